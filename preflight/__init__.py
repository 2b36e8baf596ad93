"""Checks of a node and between nodes: collect with a deadline, judge purely, report once."""
