"""Calls of UNets and VAEs in bands of rows."""
