"""Predict how fast a stage of a ladder is, before it is timed, and keep the prediction."""

from collections.abc import Sequence

from measure.interleaved.process import in_fresh_process
from measure.ladder.device import Device
from measure.ladder.record import Predictions
from measure.ladder.stages import Stage
from runtime.report import machine


def predict_stages(stages: Sequence[Stage], device: Device) -> None:
    """Predict the stages of one rank, keep the predictions in the record, print each factor.

    Nothing is predicted without the device's rates. A ladder that is resumed on the same device
    keeps the rates with which it began, before anything was timed.
    """
    record, alone = stages[0].record, [stage for stage in stages if stage.ranks == 1]
    where, kept = f"{machine()}; {device.name}", record.predicted
    if not kept or kept.where != where:
        record.predicted = None
        if not device.tflops or None in (device.gigabytes_per_s, device.launch_us):
            print("note: nothing is predicted, as the device's rates could not be measured")
            return
        kept = Predictions(where=where, rates=device, stages={})
    configs = [stage.config for stage in alone]
    found, problem = in_fresh_process("measure.ladder.roofline:predict_all", configs, kept.rates)
    if problem:
        print(f"note: nothing is predicted: {problem}")
        return
    predicted = dict(zip((stage.name for stage in alone), found, strict=True))
    kept.stages |= predicted
    record.predicted = kept
    record.save()
    for stage in alone:
        if stage.base in alone:
            base = predicted[stage.base.name]
            factor = predicted[stage.name].tokens_per_sec / base.tokens_per_sec
            print(f"predicted: {stage.name} {factor:.2f} times as fast as {stage.base.name}")
