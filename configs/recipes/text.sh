#!/usr/bin/env bash
# Write the corpus of these stages, data/docs4096: documentation of 14 Python packages, as their
# sources on PyPI hold it, in a vocabulary of its own. Every 20th file is for validation. Rates are
# tuned on data/docs4096_tuning, which has the same training text: its tail, by val_fraction, is the
# validation text of the tuning.
set -euo pipefail
sdists=${1:-sdists} # a folder for the packages' sources
python -m pip download --quiet --no-deps --no-binary :all: --dest "$sdists" Django==5.2.8 \
    salt==3007.8 Sphinx==8.2.3 celery==5.5.3 Scrapy==2.13.3 pylint==3.3.9 docutils==0.22.2 \
    wagtail==7.1.2 sympy==1.14.0 networkx==3.5 Twisted==25.5.0 buildbot==4.3.0 mercurial==7.1.1 \
    astroid==3.3.11
for sdist in "$sdists"/*.tar.gz; do tar xzf "$sdist" -C "$sdists"; done
# in an order that is random, and the same everywhere
find "$sdists" \( -name '*.rst' -o -name '*.txt' -o -name '*.md' \) -size +2k -not -path '*test*' \
    -printf '%P\n' | LC_ALL=C sort | LC_ALL=C sort -R --random-source=<(yes) | sed "s|^|$sdists/|" |
    xargs -d '\n' python data/text.py --name docs4096 --vocab_size 4096 --val_every 20
mkdir data/docs4096_tuning
ln data/docs4096/tokenizer.json data/docs4096/docs4096_train_*.bin data/docs4096_tuning/
