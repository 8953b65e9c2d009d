"""A run on disk: save it, resume it as if it had never stopped, and read weights from anywhere.

A checkpoint is a folder `<run>/checkpoints/step_<step>/`. Nothing in it is ever unpickled:

- `model.safetensors`: the weights under GPT-2's own names; a tied output head is stored once, as
  `transformer.wte.weight`
- `optimizer.safetensors`: the optimizers' state, `<parameter>/<name>`
- `checkpoint.json`: the step, the options, the random states and everything else that is no tensor
- `SHA256SUMS`: the checksums of these files, which loading verifies (and `sha256sum -c`)

The files are the same with FSDP and without, for any number of ranks. `State` in state.py says
what a run's state is: further tensors are one more entry in `State.tensors`, a file of their own.

A checkpoint is written under another name, flushed to disk and renamed: it is complete or absent.
"""
