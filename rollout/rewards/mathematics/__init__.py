"""Reading mathematical answers and deciding whether two are equal: no evaluator of strings, and bounded work.

typography   what changes how an answer looks and not what it says
tokens       text to tokens
expression   the tree of an expression
parser       tokens to an expression
units        what stands after a number
answers      what an answer can be: value, list, set, interval, matrix, equation, inequality, words
reading      text to an answer
folding      exact rational arithmetic on an expression
numerics     its value to any precision, with a bound on the error
separation   how near to zero an algebraic number can be without being zero
equality     whether two expressions have one value
real_sets    unions of intervals
comparison   whether two answers are one
work         the budget that all of it spends from
"""
