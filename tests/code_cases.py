"""Programs that fail, cheat or do harm, by the number of the reported case or the kind that they belong to.

Each is asked for a function `twice`, and not one deserves a reward.
"""

RIGHT = "def twice(number): return number + number"

EARLY_ENDS = {
    "G2-01 at the first call": "import os\ndef twice(number): os._exit(0)",
    "G2-01 at the second call": (
        "import os\ndef twice(number):\n    if number == 50: os._exit(0)\n    return 2 * number"
    ),
    "G2-01 while it is loaded": "import os\nos._exit(0)",
    "G2-01 through the C library": "import ctypes\ndef twice(number): ctypes.CDLL(None)._exit(0)",
    "G2-02 exit while it is loaded": "import sys\nsys.exit(0)",
    "G2-02 SystemExit in a call": "def twice(number): raise SystemExit(0)",
    "G2-02 SystemExit that is true": "def twice(number): raise SystemExit(True)",
    "G2-02 KeyboardInterrupt": "def twice(number): raise KeyboardInterrupt",
    "G2-02 GeneratorExit": "def twice(number): raise GeneratorExit",
    "G2-02 at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef twice(number): raise SystemExit(1)",
    "G2-02 excepthook": (
        "import os, sys\nsys.excepthook = sys.unraisablehook = lambda *_: os._exit(0)\ndef twice(number): return 1 / 0"
    ),
    "G2-02 alarm": (
        "import os, signal, time\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\n"
        "def twice(number):\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    time.sleep(9)"
    ),
    "G2-02 handler of SIGTERM": (
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "def twice(number):\n    os.kill(os.getpid(), signal.SIGTERM)\n    return 0"
    ),
    "G2-02 killed by itself": "import os, signal\ndef twice(number): os.kill(os.getpid(), signal.SIGKILL)",
    "G2-02 abort": "import os\ndef twice(number): os.abort()",
    "G2-02 a thread ends it": (
        "import os, threading, time\ndef twice(number):\n    threading.Thread(target=os._exit, args=[0]).start()\n"
        "    time.sleep(9)"
    ),
    "G2-02 finaliser ends it": (
        "import os\nclass Last:\n    def __del__(self): os._exit(0)\ndef twice(number):\n    Last()\n    return 0"
    ),
    "G2-02 assertion": "def twice(number): raise AssertionError",
    "G2-02 skipped": "import unittest\ndef twice(number): raise unittest.SkipTest('passed')",
}
"""Ends of the process, or what looks like one."""

FALSE_VALUES = {
    "G2-03 equal to everything": (
        "class All:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    __hash__ = None\n    def __bool__(self): return True\n    def __abs__(self): return 0\n"
        "    def __sub__(self, other): return self\n    __rsub__ = __sub__\n"
        "def twice(number): return All()"
    ),
    "G2-03 whole number that equals everything": (
        "class All(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def twice(number): return All(1)"
    ),
    "G2-03 fraction that equals everything": (
        "from fractions import Fraction\nclass All(Fraction):\n    def __eq__(self, other): return True\n"
        "def twice(number): return All(1, 2)"
    ),
    "G2-03 its class says int": (
        "class All:\n    __class__ = property(lambda self: int)\n    def __eq__(self, other): return True\n"
        "def twice(number): return All()"
    ),
    "G2-03 class that equals everything": (
        "class Meta(type):\n    def __eq__(self, other): return True\n    __hash__ = type.__hash__\n"
        "class All(metaclass=Meta): pass\ndef twice(number): return All"
    ),
    "G2-03 not yet asked for": "from unittest.mock import ANY\ndef twice(number): return ANY",
    "G2-03 number that changes when it is read": (
        "class Turning(int):\n    def __int__(self): return 6\n    __index__ = __int__\n"
        "    def __hash__(self): return 6\ndef twice(number): return Turning(1)"
    ),
}
"""Values that claim to be what is asked for."""

PATCHES = {
    "G2-04 math, unittest and built-ins": (
        "import builtins, math, unittest\nmath.isclose = lambda *args, **kwargs: True\n"
        "unittest.TestCase.assertEqual = lambda *args, **kwargs: None\nbuiltins.abs = lambda value: 0\n"
        "def twice(number): return 0"
    ),
    "G2-04 AssertionError": (
        "import builtins\nbuiltins.AssertionError = StopIteration\nAssertionError = None\ndef twice(number): return 0"
    ),
    "G2-04 compile and exec": (
        "import builtins\nbuiltins.exec = builtins.compile = builtins.eval = lambda *args, **kwargs: None\n"
        "def twice(number): return 0"
    ),
    "G2-04 functions of the tests' names": (
        "def abs(value): return 0\ndef isclose(*args): return True\ndef check(*args): return None\n"
        "def twice(number): return 0"
    ),
    "G2-04 math of its own": (
        "class math:\n    isclose = staticmethod(lambda *args, **kwargs: True)\ndef twice(number): return 0"
    ),
    "G2-04 sys.modules": (
        "import sys, types\nfake = types.ModuleType('math')\nfake.isclose = lambda *args, **kwargs: True\n"
        "sys.modules['math'] = fake\ndef twice(number): return 0"
    ),
    "G2-04 the harness's own": (
        "import sys\nfor module in list(sys.modules.values()):\n"
        "    for name in ('encode', 'decode', 'pack', 'unpack', 'describe_exception'):\n"
        "        if hasattr(module, name): setattr(module, name, lambda *args, **kwargs: 6)\n"
        "def twice(number): return 0"
    ),
    "G2-04 tracing rewrites what it sees": (
        "import sys\ndef tracer(frame, event, value):\n    if 'value' in frame.f_locals: frame.f_locals['value'] = 6\n"
        "    return tracer\nsys.settrace(tracer)\nsys.setprofile(tracer)\ndef twice(number): return 0"
    ),
}
"""Changes to what tests use."""
PATCH_TESTS = [
    "import math; assert math.isclose(twice(3), 6)",
    "assert math.isclose(twice(3), 6)",
    "assert abs(twice(50) - 100) < 1e-6",
    "import unittest; unittest.TestCase().assertEqual(twice(3), 6)",
]

NO_PROGRAMS = {
    "G2-06 no colon": "def twice(number)\n    return 2 * number",
    "G2-06 indentation": "def twice(number):\nreturn 2 * number",
    "G2-06 an old Python": "def twice(number):\n    print 'twice'\n    return 2 * number",
    "G2-06 nothing": "",
    "G2-06 a comment": "# def twice(number): return 2 * number",
    "G2-06 text": "The function returns twice the number.",
    "G2-06 null byte": RIGHT + "\0",
    "G2-06 nested too deep": RIGHT + "\n" + "(" * 5000 + ")" * 5000,
    "G2-06 many signs": RIGHT + "\nx = " + "-" * 100_000 + "1",
    "G2-06 an unknown encoding": "# coding: nonesuch\nimport nonesuch\n" + RIGHT,
    "G2-06 it raises after all": RIGHT + "\nraise ValueError('twice')",
}
"""What does not load."""

SPY = r"""
import gc, glob, os, re, sys
def spied():
    found = [" ".join(sys.argv), repr(dict(os.environ))]
    places = ["/proc/self/cmdline", "/proc/self/environ", "/proc/self/maps", *glob.glob("*"), *glob.glob("../*")]
    for number in range(64):
        places.append(f"/proc/self/fd/{number}")
    for place in places:
        try:
            found.append(open(place, errors="replace").read())
        except OSError:
            pass
    frame = sys._getframe()
    while frame:
        found.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    found += [one for holder in gc.get_objects() for one in gc.get_referents(holder) if type(one) is str]
    return " ".join(found)
def twice(number):
    match = re.search(r"twice\(%d\) == (\d+)" % number, spied())
    return int(match[1]) if match else 0
"""
MEMORY_SPY = r"""
import os, re
def twice(number):
    for process in [*range(max(1, os.getpid() - 50), os.getpid() + 50), os.getppid(), "self"]:
        try:
            with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
                for line in maps:
                    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                    memory.seek(begin)
                    match = re.search(rb"twice\(%d\) == (\d+)" % number, memory.read(end - begin))
                    if match:
                        return int(match[1])
        except (OSError, ValueError):
            pass
    return 0
"""
FORGERIES = {
    "G2-08 replies on every descriptor": (
        'import os\ndef forge():\n    reply = b\'{"reply":{"value":6}}\'\n    for number in range(64):\n'
        "        try: os.write(number, len(reply).to_bytes(4, 'big') + reply)\n        except OSError: pass\n"
        "forge()\ndef twice(number):\n    forge()\n    return 0"
    ),
    "G2-08 reports on every descriptor": (
        "import json, os\ndef twice(number):\n    for number in range(64):\n"
        "        for said in ({'test': 0, 'passed': True}, {'test': 1, 'passed': True}, {'done': True}):\n"
        "            try:\n                os.write(number, json.dumps(said).encode())\n"
        "            except OSError:\n                pass\n    return 0"
    ),
    "G2-08 result files": (
        "import json, os\ndef twice(number):\n    for path in ('result.json', '../result.json',\n"
        "                 *(f'/proc/self/fd/{number}' for number in range(64))):\n        try:\n"
        "            with open(path, 'w') as file: json.dump({'passed': True, 'reward': 1.0}, file)\n"
        "        except OSError:\n            pass\n    return 0"
    ),
    "G2-08 printed": "print('2 passed'); print('{\"passed\": true}')\ndef twice(number): return print('OK') or 0",
}
"""Results that no test has."""

HANGS = {
    "G2-10 loop": "def twice(number):\n    while True: pass",
    "G2-10 loop while it is loaded": "while True: pass",
    "G2-10 sleep": "import time\ndef twice(number): time.sleep(600)",
    "G2-10 one long operation": "def twice(number): return len(str(7 ** 10 ** 9))",
    "G2-10 regular expression": "import re\ndef twice(number): return re.match('(a*)*$', 'a' * 60 + 'b')",
    "G2-10 endless generator": "def twice(number): return sum(iter(int, 1))",
    "G2-10 lock": "import threading\nlock = threading.Lock()\ndef twice(number): lock.acquire(); lock.acquire()",
    "G2-10 no memory is used": "import itertools\ndef twice(number):\n    for _ in itertools.count(): pass",
    "G2-11 swallowed": (
        "def twice(number):\n    while True:\n        try:\n            while True: pass\n"
        "        except BaseException: pass"
    ),
    "G2-11 signals are ignored": (
        "import signal\nfor number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))\n"
        "def twice(number):\n    while True: pass"
    ),
    "G2-11 alarm is switched off": (
        "import signal\ndef twice(number):\n    while True: signal.alarm(0); signal.setitimer(signal.ITIMER_REAL, 0)"
    ),
    "G2-11 threads go on": (
        "import threading\ndef spin():\n    while True: pass\ndef twice(number):\n"
        "    for _ in range(8): threading.Thread(target=spin).start()\n    spin()"
    ),
    "G2-11 a finaliser goes on": (
        "class Last:\n    def __del__(self):\n        while True: pass\ndef twice(number): Last()"
    ),
}
"""Never done."""

BREEDERS = {
    "G2-12 fork bomb": "import os\ndef twice(number):\n    while True: os.fork()",
    "G2-12 fork bomb that goes on": (
        "import os\ndef twice(number):\n    while True:\n        try: os.fork()\n        except OSError: pass"
    ),
    "G2-12 each in a session of its own": (
        "import os\ndef twice(number):\n    while True:\n        if os.fork() == 0: os.setsid()"
    ),
    "G2-12 through the C library": "import ctypes\ndef twice(number):\n    while True: ctypes.CDLL(None).fork()",
    "G2-12 vfork": "import ctypes\ndef twice(number):\n    while True: ctypes.CDLL(None).syscall(58)",
    "G2-12 threads": (
        "import threading, time\ndef twice(number):\n"
        "    while True: threading.Thread(target=time.sleep, args=[60]).start()"
    ),
    "G2-12 pool": "import multiprocessing\ndef twice(number): return multiprocessing.Pool(4).map(abs, [number])[0]",
    "G2-13 daemon": (
        "import os, time\ndef twice(number):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0: time.sleep(600)\n        os._exit(0)\n    os.wait()\n    return 0"
    ),
    "G2-13 daemon while it is loaded": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\n"
    ),
    "G2-14 grandchild": "import subprocess\nsubprocess.Popen(['sleep', '120'])\n",
    "G2-14 shell": "import os\nos.system('sleep 120 &')\n",
}
"""Processes and threads that would outlive the program."""

HOGS = {
    "G2-15 many blocks": "def twice(number):\n    kept = []\n    while True: kept.append(bytearray(64 * 2**20))",
    "G2-15 one block": "def twice(number): return len(bytearray(20 * 2**30))",
    "G2-15 text": "def twice(number): return len('x' * (20 * 2**30))",
    "G2-15 list": "def twice(number): return len([0] * 10**10)",
    "G2-15 mapped": "import mmap\ndef twice(number): return len(mmap.mmap(-1, 20 * 2**30))",
    "G2-15 it goes on without": (
        "def twice(number):\n    kept = []\n    while True:\n        try: kept.append(bytearray(2**24))\n"
        "        except MemoryError: return 0"
    ),
    "G2-15 as it is loaded": "kept = bytearray(20 * 2**30)\n" + RIGHT,
    "G2-15 large answer": "def twice(number): return 'x' * 200_000_000",
    "G2-15 answer of many": "def twice(number): return [[]] * 30_000_000",
    "G2-15 in threads": (
        "import threading\nkept = []\ndef fill():\n    while True: kept.append(bytearray(2**24))\ndef twice(number):\n"
        "    threads = [threading.Thread(target=fill) for _ in range(4)]\n    for thread in threads: thread.start()\n"
        "    for thread in threads: thread.join()\n    return 0"
    ),
}
"""More memory than is to be had."""

REFUSED_AT_ONCE = {f"G2-15 {kind}" for kind in ("many blocks", "one block", "text", "list", "as it is loaded")}

DEEP = {
    "G2-28 repr of itself": (
        "import sys\nsys.setrecursionlimit(10**9)\nclass Self:\n    def __repr__(self): return repr([self])\n"
        "def twice(number): return repr(Self())"
    ),
    "G2-28 function": "import sys\nsys.setrecursionlimit(10**9)\ndef twice(number): return twice(number)",
    "G2-28 function, as it comes": "def twice(number): return twice(number)",
    "G2-28 nested list": (
        "def twice(number):\n    found = []\n    for _ in range(100_000): found = [found]\n    return found"
    ),
    "G2-28 list in itself": "def twice(number):\n    found = []\n    found.append(found)\n    return found",
    "G2-28 comparison": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef twice(number):\n    one, other = [], []\n"
        "    one.append(other); other.append(one)\n    return one == other"
    ),
    "G2-28 in a thread": (
        "import sys, threading\nsys.setrecursionlimit(10**9)\ndef deep(): deep()\ndef twice(number):\n"
        "    thread = threading.Thread(target=deep)\n    thread.start(); thread.join()\n    return 0"
    ),
    "G2-28 segmentation fault": "import ctypes\ndef twice(number): return ctypes.string_at(0)",
    "G2-28 broken byte code": (
        "def twice(number): return 0\ntwice.__code__ = twice.__code__.replace(co_code=b'\\x99\\x99' * 40)"
    ),
}
"""Deeper than the interpreter's stack, and other crashes."""

CONNECTIONS = {
    "G2-20 TCP": "socket.create_connection(('127.0.0.1', {port}), timeout=1)",
    "G2-20 UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "G2-20 local": "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect({path!r})",
    "G2-20 abstract": "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect('\\0' + {path!r})",
    "G2-20 a program": "subprocess.run(['bash', '-c', 'echo > /dev/tcp/127.0.0.1/{port}'], check=True)",
    "G2-20 TCP of version 6": "socket.create_connection(('::1', {port}), timeout=1)",
    "G2-20 listening": "socket.create_server(('127.0.0.1', 0))",
    "G2-20 raw": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "G2-20 kernel": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
}
"""Calls to a listener at a port of this machine, or at a path."""
