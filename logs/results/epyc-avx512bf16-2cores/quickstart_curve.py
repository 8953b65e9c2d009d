"""Make the quickstart's reference curve: mean and tolerance of the validation losses of 8 seeds.

    for seed in {1000..1007}; do python train.py --config quickstart.yaml --seed $seed \\
        --log_dir logs/curve --run_name $seed --sample_every 0 --reference none; done
    python logs/results/epyc-avx512bf16-2cores/quickstart_curve.py logs/curve/*/eval.csv \\
        > configs/reference/quickstart.csv
"""

import csv
import statistics
import sys
from pathlib import Path

print("# quickstart.yaml with 8 seeds: logs/results/epyc-avx512bf16-2cores/quickstart_curve.py")
print("# tolerance: 5 standard deviations over the seeds\ntokens,val_loss,tolerance")
runs = [csv.DictReader(Path(name).read_text().splitlines()) for name in sys.argv[1:]]
for rows in zip(*runs, strict=True):
    losses = [float(row["val_loss"]) for row in rows]
    tokens = 4 * 128 * int(rows[0]["step"])
    print(f"{tokens},{statistics.fmean(losses):.4f},{5 * statistics.stdev(losses):.4f}")
