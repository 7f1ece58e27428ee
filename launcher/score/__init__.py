"""`towline score`: rewards for completions that are there already, in a file of any origin or in a run's ledger."""
