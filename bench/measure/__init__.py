"""How a call is measured: the machine, the oracle's verdict, clocks, interleaved rounds."""
