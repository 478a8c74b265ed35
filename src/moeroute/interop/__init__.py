"""This package under the names of other libraries: one module a host.

They map names and conventions onto the verbs of `moeroute` and `moeroute.nn` and do no arithmetic of their
own. A host is imported when a function is called, not before; docs/interop.md has an example for each.
"""
