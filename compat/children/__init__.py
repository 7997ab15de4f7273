"""The redirect in processes that a redirected process starts.

An import hook lives in one process. A child that starts a fresh interpreter (``multiprocessing`` by spawn or by a fork
server, ``subprocess``, torchrun started from the script, loky) would import the real FairScale, and nothing would say
so. Such a child gets the redirect from the environment: ``PYTHONPATH`` begins with this folder, whose ``sitecustomize``
Python runs when it starts. A forked child has its parent's hook.

A child that is started with ``-E`` or ``-I``, or with an environment of its own, has none of this, and nothing warns.
Among those of ``multiprocessing`` these are two: it hands ``-E`` and ``-I`` on where the script itself has them, and a
fork server that ran before the redirect has the environment of that time.
"""
