"""`python -m critical_neurons` is the command line tool."""

from critical_neurons.cli import main

main()
