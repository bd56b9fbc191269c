"""Compare groups of runs: which one learned more, how much sooner, and how sure that is.

trajectory   one run or log as columns      curves   values at places, places of values, their ratios with intervals
differences  what the runs differ in        groups   the comparison itself      view   text, page and pictures
"""

from draftline.compare.groups import Comparison, compare_groups, name_groups

__all__ = ["Comparison", "compare_groups", "name_groups"]
