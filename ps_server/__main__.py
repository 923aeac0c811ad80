"""`pushpull server`: one parameter server."""

from ps_runtime.system.collector import spared

with spared():
    from ps_server.process import main

if __name__ == "__main__":
    main()
