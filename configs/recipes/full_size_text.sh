#!/usr/bin/env bash
# Write full_text.tar.xz: English documentation from Debian 12, one document per file. Needs Debian
# 12 with w3m and man-db. On 2026-11-28 the archive had 45,228,656 bytes and the SHA-256
# bfdc0eace7d3d8b1ca7c3c2d253f3d60eb3b5acb93b5355edb30eda122ebf4d1, written twice. A security update
# of a package may change its text, and with it the hash.
# The name of a file begins with the hash of its text, so that the order is random, but the same
# everywhere, and no text occurs twice. Then, on any machine:
#     tar xJf full_text.tar.xz && python data/text.py full_text --val_every 50
# It has 95,037,823 tokens of 27,270 documents, 1,675,305 of them for validation. Then, on a GPU of
# 80 GB, train with the old recipe and the modern one for about eight minutes (2.5 epochs) each:
# the old one alone with --stages gpt2_124m before the --, then both. The report has the loss and
# the tokens to the old one's final loss; the same command with --rounds 8 interleaves their speeds
# and adds the time. Each run prints its memory and any update skipped as not finite.
#     python ladder.py gpt2_124m.yaml gpt2_124m_fast.yaml --seeds 1 --rounds 0 -- \
#         --dataset full_text --max_steps 900 --warmup_steps 50 --batch_size 64 \
#         --total_batch_tokens 262144 --compile_mode default --eval_every 100 \
#         --eval_tokens 1048576 --hellaswag_every 0 --sample_every 0 --reference null
# 50 steps of warm-up for both: gpt2_124m.yaml's own 715 would be most of so short a run, and
# gpt2_124m_fast.yaml has none. Their speed and memory beside residual_bf16's, interleaved:
#     python -m measure.interleaved gpt2_124m.yaml gpt2_124m_fast.yaml \
#         "gpt2_124m_fast.yaml --residual_bf16" --rounds 8 -- --dataset full_text --batch_size 64 \
#         --total_batch_tokens 262144 --compile_mode default
# All ran on a CPU with one layer of 32, not on a GPU yet.
set -euo pipefail
export LC_ALL=C.UTF-8 MANWIDTH=80 package
to_text() {
    for file; do
        case $file in
            *.html) w3m -dump -cols 100 -I UTF-8 -O UTF-8 "$file" ;;
            *.md.gz) zcat "$file" ;;
            *.gz) man --local-file "$file" 2>/dev/null ;;
            *) cat "$file" ;;
        esac | iconv -c -f UTF-8 -t UTF-8 >text.$$
        hash=$(sha256sum text.$$)
        mv text.$$ "full_text/${hash:0:16}.$package.txt"
    done
}
export -f to_text
archive=$PWD/full_text.tar.xz
mkdir -p "${1:-packages}/full_text" # a new folder for the packages
cd "${1:-packages}"
while read -r package pattern; do
    apt-get download --quiet "$package"
    dpkg-deb -x "${package}"_*.deb "$package"
    find "$package" -type f -path "$pattern" -not -path '*/translations/*' -print0 |
        xargs -0 -n 50 -P "$(nproc)" bash -c 'to_text "$@"' -
done <<'PACKAGES'
linux-doc-6.1 */_sources/*.txt
python3.11-doc */_sources/*.txt
llvm-14-doc */_sources/*.txt
dpdk-doc */_sources/*.txt
python-sklearn-doc */_sources/*.txt
python-pandas-doc */_sources/*.txt
python-astropy-doc */_sources/*.txt
nova-doc */_sources/*.txt
neutron-doc */_sources/*.txt
cinder-doc */_sources/*.txt
keystone-doc */_sources/*.txt
glance-doc */_sources/*.txt
heat-doc */_sources/*.txt
swift-doc */_sources/*.txt
ghc-doc */_sources/*.txt
debian-policy */_sources/*.txt
python-sqlalchemy-doc *.rst
python-django-doc *.html
perl-doc *.gz
vim-runtime */doc/*.txt
git-doc *.txt
manpages *.gz
manpages-dev *.gz
ada-reference-manual-2012 */aarm2012.txt/*
nodejs-doc *.md.gz
postgresql-doc-15 *.html
qtbase5-doc-html *.html
qtdeclarative5-doc-html *.html
racket-doc *.html
libboost1.74-doc *.html
libreoffice-help-en-us *.html
cppreference-doc-en-html *.html
apache2-doc */en/*.html
developers-reference *.html
debian-handbook */en-US/*.html
debian-reference-en *.html
installation-guide-amd64 */en/*.html
rust-doc */html/[benr]*/*.html
exim4-doc-html *.html
bind9-doc *.html
postfix-doc *.html
zsh-doc *.html
libvirt-doc *.html
grass-doc *.html
gimp-help-en *.html
xen-doc *.html
maxima-doc *.html
r-doc-html *.html
db5.3-doc */programmer_reference/*.html
libstdc++-12-doc */manual/*.html
PACKAGES
find full_text -size -2k -delete # too short to learn from
tar -c --sort=name --mtime=@0 --owner=0 --group=0 --mode=644 full_text | xz -9 >"$archive"
