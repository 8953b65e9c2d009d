"""A run on disk: save it, resume it as if it had never stopped, and read weights from anywhere.

A checkpoint is a folder `<run>/checkpoints/step_<step>/`. Nothing in it is ever unpickled:

- `model.safetensors`: the weights under GPT-2's own names; a tied output head is stored once, as
  `transformer.wte.weight`
- `optimizer.safetensors`: the optimizers' state, `<parameter>/<name>`
- `checkpoint.json`: the step, the options, the random states and everything else that is no tensor
- `SHA256SUMS`: the checksums of these files, which loading verifies (and `sha256sum -c`)

With FSDP the folders `model/` and `optimizer/` take the place of the first two files: one
safetensors file per rank, written by torch.distributed.checkpoint. Any number of ranks reads
either form, with FSDP or without.

A checkpoint is written under another name, flushed to disk and renamed: it is complete or absent.
"""
