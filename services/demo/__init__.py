"""The demo (`lachesis demo`, `make demo`).

The whole pipeline on real tasks, and a verdict on whether it learned.

settings    the run's configuration, from `demo.toml` and the command line
prepare     the model to train: tokenizer, random weights, supervised warm start; cached
pretrained  the pretrained language model and its sums, in place of `prepare`
watch       what the bus says of the run, folded into `observed`
observed    everything seen of the run (pure)
view        live progress on a terminal or as lines
summary     the verdict and the figures (pure), `report` their text, `plots` the pictures
run         all of it in order
"""
