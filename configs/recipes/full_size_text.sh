#!/usr/bin/env bash
# Write full_text.tar.xz: English documentation from Debian 12, one document per file. Needs Debian
# 12 with w3m and man-db. Packages that Debian has replaced since are on snapshot.debian.org.
# The name of a file begins with the hash of its text, so that the order is random, but the same
# everywhere, and no text occurs twice. Then, on any machine:
#     tar xJf full_text.tar.xz && python data/text.py full_text --val_every 50
# And on a GPU of 80 GB, the old recipe and the modern one for about eight minutes each, first the
# old one alone with --stages gpt2_124m before the --; the report has loss, tokens and time to the
# old one's final loss, and each run prints its memory and any update skipped as not finite:
#     python ladder.py gpt2_124m.yaml gpt2_124m_fast.yaml --seeds 1 --rounds 0 -- \
#         --dataset full_text --max_steps 900 --warmup_steps 50 --batch_size 64 \
#         --total_batch_tokens 262144 --compile_mode default --eval_every 100 \
#         --eval_tokens 1048576 --hellaswag_every 0 --sample_every 0 --reference null
# 50 steps of warm-up for both: gpt2_124m.yaml's own 715 would be most of so short a run, and
# gpt2_124m_fast.yaml has none. And their speed and memory, interleaved:
#     python -m measure.interleaved gpt2_124m.yaml gpt2_124m_fast.yaml \
#         "gpt2_124m_fast.yaml --residual_bf16" --rounds 8 -- --dataset full_text --batch_size 64 \
#         --total_batch_tokens 262144 --compile_mode default
# Both commands ran on a CPU with one layer of 32, not on a GPU yet.
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
mkdir -p "${1:-packages}/full_text" # a folder for the packages
cd "${1:-packages}"
while read -r package version pattern; do
    apt-get download --quiet "$package=$version"
    dpkg-deb -x "${package}"_*.deb "$package"
    find "$package" -type f -path "$pattern" -not -path '*/translations/*' -print0 |
        xargs -0 -n 50 -P "$(nproc)" bash -c 'to_text "$@"' -
done <<'PACKAGES'
linux-doc-6.1 6.1.192-2 */_sources/*.txt
python3.11-doc 3.11.2-6+deb12u9 */_sources/*.txt
llvm-14-doc 1:14.0.6-12 */_sources/*.txt
dpdk-doc 22.11.11-0+deb12u1 */_sources/*.txt
python-sklearn-doc 1.2.1+dfsg-1 */_sources/*.txt
python-pandas-doc 1.5.3+dfsg-2 */_sources/*.txt
python-astropy-doc 5.2.1-2+deb12u1 */_sources/*.txt
nova-doc 2:26.2.2-1~deb12u5 */_sources/*.txt
neutron-doc 2:21.0.0-7+deb12u1 */_sources/*.txt
cinder-doc 2:21.3.1-1~deb12u1 */_sources/*.txt
keystone-doc 2:22.0.2-0+deb12u6 */_sources/*.txt
glance-doc 2:25.1.0-2+deb12u5 */_sources/*.txt
heat-doc 1:19.0.0-3 */_sources/*.txt
swift-doc 2.30.1-0+deb12u3 */_sources/*.txt
ghc-doc 9.0.2-4 */_sources/*.txt
debian-policy 4.6.2.0 */_sources/*.txt
python-sqlalchemy-doc 1.4.46+ds1-1 *.rst
python-django-doc 3:3.2.25-0+deb12u7 *.html
perl-doc 5.36.0-7+deb12u4 *.gz
vim-runtime 2:9.0.1378-2+deb12u2 */doc/*.txt
git-doc 1:2.39.5-0+deb12u3 *.txt
manpages 6.03-2 *.gz
manpages-dev 6.03-2 *.gz
ada-reference-manual-2012 1:2020.1commit85143dcb-4 */aarm2012.txt/*
nodejs-doc 18.20.4+dfsg-1~deb12u3 *.md.gz
postgresql-doc-15 15.20-0+deb12u1 *.html
qtbase5-doc-html 5.15.8+dfsg-11+deb12u3 *.html
qtdeclarative5-doc-html 5.15.8+dfsg-3 *.html
racket-doc 8.7+dfsg1-1 *.html
libboost1.74-doc 1.74.0+ds1-21 *.html
libreoffice-help-en-us 4:7.4.7-1+deb12u14 *.html
cppreference-doc-en-html 20170409-2 *.html
apache2-doc 2.4.71-1~deb12u1 */en/*.html
developers-reference 12.18 *.html
debian-handbook 11.20220922 */en-US/*.html
debian-reference-en 2.100 *.html
installation-guide-amd64 20230508+deb12u1 */en/*.html
rust-doc 1.63.0+dfsg1-2 */html/[benr]*/*.html
exim4-doc-html 4.96-1 *.html
bind9-doc 1:9.18.49-1~deb12u3 *.html
postfix-doc 3.7.11-0+deb12u1 *.html
zsh-doc 5.9-4 *.html
libvirt-doc 9.0.0-4+deb12u2 *.html
grass-doc 8.2.1-1 *.html
gimp-help-en 2.10.34-2 *.html
xen-doc 4.17.7+13-g2445b30a44-0+deb12u1 *.html
maxima-doc 5.46.0-11 *.html
r-doc-html 4.2.2.20221110-2 *.html
db5.3-doc 5.3.28+dfsg2-1 */programmer_reference/*.html
libstdc++-12-doc 12.2.0-14+deb12u1 */manual/*.html
PACKAGES
find full_text -size -2k -delete # too short to learn from
tar -c --sort=name --mtime=@0 --owner=0 --group=0 --mode=644 full_text | xz -9 >"$archive"
