"""Reading mathematical answers and deciding whether two are equal: no evaluator of strings, and bounded work.

typography   what changes how an answer looks and not what it says
tokens       text to tokens
parser       tokens to an expression
reading      text to an answer: value, list, set, interval, matrix, equation, inequality, words
expression   the tree of an expression
folding      exact rational arithmetic on it
numerics     the same tree to any precision
separation   how near to zero an algebraic number can be without being zero
equality     whether two expressions have one value
real_sets    unions of intervals
comparison   whether two answers are one
work         the budget that all of it spends from
"""
