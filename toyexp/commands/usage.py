"""How the commands that only tell something are used."""

PLUGINS_HELP = """\
usage: toyexp plugins [NAME] [--matrix] [plugins=[my_module]]

What can be asked for: every engine, recipe, model, data set and callback, and which plugins are broken.
  toyexp plugins                      all of them
  toyexp plugins warm                 the settings of one
  toyexp plugins --matrix             which recipe trains which model, and why not
  toyexp plugins plugins=[my_module]  with those of a file in the current directory"""

DOCTOR_HELP = """\
usage: toyexp doctor [--numerics [engine=NAME,...]] [--graph [key=value ...]]

Which engines work here, and why the others do not.
  toyexp doctor
  toyexp doctor --numerics engine=ggml        whether it computes every op and a short training as float64 does
  toyexp doctor --graph engine=ggml model=gpt2  which ops of a training step run on which device

--numerics exits with 1 when something is off. plugins=[my_module] goes with both."""
