"""What a run is made of: options, the run folder's file names, and errors that a user can act on."""
