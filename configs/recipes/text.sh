#!/usr/bin/env bash
# Write the corpus of these stages, data/docs4096: the documentation of 18 Python packages, as their
# sources on PyPI hold it, without change logs, news, translations and lists of an API, in a
# vocabulary of its own. Every 20th file is for validation. Rates are tuned on data/docs4096_tuning,
# which has the same training text: its tail, by val_fraction, is the validation text of the tuning.
set -euo pipefail
sdists=${1:-sdists} # a folder for the packages' sources
python -m pip download --quiet --no-deps --no-binary :all: --dest "$sdists" Django==5.2.8 \
    Sphinx==8.2.3 celery==5.5.3 Scrapy==2.13.3 sympy==1.14.0 Twisted==25.5.0 buildbot==4.3.0 \
    SQLAlchemy==2.0.44 pyramid==2.0.2 dask==2025.11.0 xarray==2025.11.0 nova==32.0.0 \
    neutron==27.0.0 cinder==27.0.0 keystone==28.0.0 ironic==32.0.0 manila==21.0.0 swift==2.36.0
for sdist in "$sdists"/*.tar.gz; do tar xzf "$sdist" -C "$sdists"; done
# in an order that is random, and the same everywhere
find "$sdists" \( -name '*.rst' -o -name '*.txt' -o -name '*.md' \) -size +4k -path '*doc*' \
    -not -path '*test*' -printf '%P\n' |
    grep -viE 'change|release|history|what.?s_?new|news|locale|/api' |
    LC_ALL=C sort | LC_ALL=C sort -R --random-source=<(yes) | sed "s|^|$sdists/|" |
    xargs -d '\n' python data/text.py --name docs4096 --vocab_size 4096 --val_every 20
mkdir data/docs4096_tuning
ln data/docs4096/tokenizer.json data/docs4096/docs4096_train_*.bin data/docs4096_tuning/
