"""Context-parallel attention while a rank or the network has a fault: `bash tests/faults/run`.

scenario    a fault, the point where it happens, and what every rank has to answer
rank        what each process runs; the fault is injected around the functions of scaledot.distributed.transport
network     a network of namespaces and TUN devices, with links that delay, lose and drop packets
stage       starts the processes of a scenario and its network, and judges the answers
many        many short runs, each in process groups that it creates and destroys
"""
