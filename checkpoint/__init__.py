"""Files of models: checkpoints of runs, and weights of Hugging Face and nanoGPT.

A checkpoint is a folder `<run>/checkpoints/step_<step>/`. Nothing in it is ever unpickled:

- `model.safetensors`: the weights under GPT-2's own names; a tied output head is stored once, as
  `transformer.wte.weight`
- `optimizer.safetensors`: the optimizers' state, `<parameter>/<name>`
- `checkpoint.json`: the step, the options, the random states and all else that is not a tensor
- `tokenizer.json`: the corpus's own vocabulary; without it: GPT-2's
- `SHA256SUMS`: the checksums of these files, which loading verifies (and `sha256sum -c`)

The files are the same with FSDP and without, for any number of ranks. The state of a run is
listed in run/state.py: further tensors are one more entry in `State.tensors`, with their own file.

A checkpoint is written under another name, flushed to disk and renamed: it is complete or absent.
"""
