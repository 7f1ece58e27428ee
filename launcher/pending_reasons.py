"""Why a job waits: Slurm's reasons, what each means and what to do about it. From the manual page of squeue.

A reason that is not in the table is shown as it is: Slurm has some two hundred, and sites see only a few.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    means: str
    todo: str = ""


_QOS = "`sacctmgr show qos` lists the limits: wait for other jobs of yours, ask for less, or use another qos"
_ASSOC = "`sacctmgr show associations user=$USER` lists the limits: wait, ask for less, or use another account"
_NODES = "compare the profile's options with `sinfo -N -o '%N %P %T %c %m %G'`"

REASONS = {
    "None": Reason("the scheduler has not looked at it yet"),
    "Priority": Reason("jobs of higher priority come first", "wait, or see `sprio` for what makes its priority"),
    "Resources": Reason("it is next, and the nodes it needs are in use", "wait; fewer nodes or a shorter time start "
                        "earlier"),
    "Dependency": Reason("it waits for another job to end", "nothing, or cancel the job it waits for"),
    "DependencyNeverSatisfied": Reason("the job it waits for ended in a way that rules it out", "towline cancel, then "
                                       "towline resume"),
    "BeginTime": Reason("its begin time is in the future; after a requeue Slurm waits a minute or two", "wait"),
    "Cleaning": Reason("its start before is still being cleaned up on the nodes", "wait; if that takes long, tell "
                       "the administrators"),
    "JobHeldUser": Reason("you hold it", "scontrol release JOB"),
    "JobHeldAdmin": Reason("an administrator holds it", "ask them: only they can release it"),
    "JobHoldMaxRequeue": Reason("it was requeued too often (MaxBatchRequeue)", "look at the batch log for why it "
                                "never starts, then scontrol release JOB"),
    "launch failed requeued held": Reason("its start failed on a node, and Slurm holds it", "scontrol release JOB; if "
                                          "it comes back, tell the administrators which nodes"),
    "Reservation": Reason("it waits for its reservation", "`scontrol show reservation`"),
    "ReservationDeleted": Reason("its reservation is gone", "towline cancel, and submit without it"),
    "ReqNodeNotAvail": Reason("a node that it asks for is down, drained, or kept for a reservation or maintenance",
                              "`scontrol show reservation` and `sinfo -R`; if a maintenance is near, a shorter time "
                              "limit may fit before it"),
    "NodeDown": Reason("a node that it asks for is down", "`sinfo -R` says why; leave nodelist out"),
    "BadConstraints": Reason("no node fits its constraints", _NODES),
    "PartitionConfig": Reason("it asks for more than the partition has", _NODES),
    "PartitionDown": Reason("its partition is closed", "`scontrol show partition`; use another one"),
    "PartitionInactive": Reason("its partition takes no jobs", "`scontrol show partition`; use another one"),
    "PartitionNodeLimit": Reason("it asks for more nodes than the partition gives to one job, or nodes are down",
                                 "`scontrol show partition` has MaxNodes; ask for fewer nodes"),
    "PartitionTimeLimit": Reason("its time limit is longer than the partition's", "`sinfo -o '%P %l'` lists them; set "
                                 "time in the profile"),
    "InactiveLimit": Reason("it was inactive for too long", "towline cancel, and submit again"),
    "NonZeroExitCode": Reason("it ended with an error and is held", "look at the batch log, then scontrol release "
                              "JOB"),
    "RaisedSignal": Reason("it was ended by a signal and is held", "look at the batch log, then scontrol release JOB"),
    "TimeLimit": Reason("its time was used up"),
    "SystemFailure": Reason("Slurm, a network or a file system failed", "tell the administrators"),
    "Licenses": Reason("it waits for a licence", "`scontrol show licenses`"),
    "InvalidAccount": Reason("its account is not valid (any more)", "set account in the profile: `sacctmgr show "
                             "associations user=$USER`"),
    "InvalidQOS": Reason("its qos is not valid (any more)", "set qos in the profile: `sacctmgr show associations "
                         "user=$USER format=account,qos`"),
    "AccountNotAllowed": Reason("its account may not use the partition", "use another account or partition"),
    "QOSNotAllowed": Reason("its qos may not be used with this account or partition", "use another qos"),
    "JobArrayTaskLimit": Reason("its array has as many running tasks as it may have"),
    "BurstBufferResources": Reason("the burst buffer is full", "wait"),
    "BurstBufferStageIn": Reason("files are copied to the burst buffer", "wait"),
    "FedJobLock": Reason("the clusters of the federation agree on where it runs", "wait"),
    "MaxMemPerLimit": Reason("it asks for more memory than a job may have", "ask for less: mem in the profile"),
    "MaxBillingPerAccount": Reason("the account's budget is used up", "`sshare` and your site's accounting"),
    "AssocGrpBillingMinutes": Reason("the account's budget is used up", "`sshare` and your site's accounting"),
    "AssocGrpCPUMinutesLimit": Reason("the account's CPU time is used up", "`sshare` and your site's accounting"),
    "AssocGrpGRESMinutes": Reason("the account's GPU time is used up", "`sshare` and your site's accounting"),
    "AssocGrpGRES": Reason("the account's jobs use as many GPUs as they may", _ASSOC),
    "AssocGrpNodeLimit": Reason("the account's jobs use as many nodes as they may", _ASSOC),
    "AssocMaxJobsLimit": Reason("you have as many jobs as you may have with this account", _ASSOC),
    "AssocMaxWallDurationPerJobLimit": Reason("its time limit is longer than the account's", _ASSOC),
    "QOSMaxJobsPerUserLimit": Reason("you have as many jobs as the qos allows", _QOS),
    "QOSMaxSubmitJobPerUserLimit": Reason("you have handed in as many jobs as the qos allows", _QOS),
    "QOSMaxNodePerUserLimit": Reason("your jobs use as many nodes as the qos allows", _QOS),
    "QOSMaxNodePerJobLimit": Reason("it asks for more nodes than the qos gives to one job", _QOS),
    "QOSMaxGRESPerUser": Reason("your jobs use as many GPUs as the qos allows", _QOS),
    "QOSMaxGRESPerJob": Reason("it asks for more GPUs than the qos gives to one job", _QOS),
    "QOSMaxWallDurationPerJobLimit": Reason("its time limit is longer than the qos allows", _QOS),
    "QOSMinGRES": Reason("it asks for fewer GPUs than the qos wants", _QOS),
    "QOSUsageThreshold": Reason("the use of the qos is above its threshold", _QOS),
}  # fmt: skip

_FAMILIES = {
    "AssocGrp": Reason("a limit of the account and all its users is reached", _ASSOC),
    "AssocMax": Reason("a limit of your use of the account is reached", _ASSOC),
    "AssociationJobLimit": Reason("you have as many jobs as you may have with this account", _ASSOC),
    "AssociationResourceLimit": Reason("your jobs use as much as they may with this account", _ASSOC),
    "AssociationTimeLimit": Reason("the account's time is used up", _ASSOC),
    "QOS": Reason("a limit of the qos is reached", _QOS),
    "MaxCpu": Reason("it asks for more than the limits of the partition allow", _NODES),
    "ReqNodeNotAvail": REASONS["ReqNodeNotAvail"],
    "Nodes_required_for_job_are_DOWN": REASONS["ReqNodeNotAvail"],
    "Nodes required for job are DOWN": REASONS["ReqNodeNotAvail"],
}


def reason_text(reason: str, job: str) -> str:
    """Slurm's word, what it means, and what to do."""
    known = REASONS.get(reason) or next((text for begin, text in _FAMILIES.items() if reason.startswith(begin)), None)
    if known is None:
        return reason
    todo = f". To do: {known.todo.replace('JOB', job)}" if known.todo else ""
    return f"{reason}: {known.means}{todo}"
