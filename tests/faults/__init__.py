"""Context-parallel attention while a rank is killed, stopped, slow, or does something else: `bash tests/faults/run`.

scenario    a fault, the point where it happens, and what every rank has to answer
rank        what each process runs; the fault is injected around the functions of scaledot.distributed.transport
stage       starts the processes of a scenario, wakes a stopped one, and judges the answers
many        many short runs, each in process groups that it creates and destroys
"""
