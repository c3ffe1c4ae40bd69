"""Every private name of torch that zcompile uses, and for what. The tests have run on torch 2.11 to 2.15.

Where releases differ, what a name can do is asked for, not the number of the release. Nothing outside this folder
imports from a module of torch whose path has a part beginning with an underscore.
"""
