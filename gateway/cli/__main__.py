"""`python -m gateway.cli`."""

from gateway.cli.main import main

main()
