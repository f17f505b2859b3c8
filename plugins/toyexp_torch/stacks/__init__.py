"""Several runs of one shape whose training steps are one program."""
