"""Looking at sidestep from outside: connections, the machine, programs. Looking changes nothing."""
