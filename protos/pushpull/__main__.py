"""`python -m pushpull`: the command `pushpull`."""

from ps_cli.__main__ import main

if __name__ == "__main__":
    main()
