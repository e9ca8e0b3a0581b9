# make demo         trains a Llama with all its state on two device files, kills everything in mid-step, and resumes
# make check        the daily command: formatting, lints, links of documents, unit tests, both simulations with few seeds
# make test         formatting, lints, links, words, licenses, every test; lists skipped tests, the slowest targets and the slowest tests
# make nightly      the same with more cases, seeds, kills, crash images and restarts, rustdoc, and the wheel in an empty environment
# make test-tools   installs the tools of some tests (as root with apt; by pip NVRTC and, for the Python tests, PyTorch: 5 GB)
# make docs         writes the generated pages and pictures: configuration, commands, on-disk format, models
# make test-counts  records how many tests each target has; `make test` fails when fewer run
# make deny         checks licenses, sources and advisories of all dependencies, with cargo-deny and the network
# make build        builds offloadd, trainer and bench-io in target/release
# make install      installs the programs, their manual pages and completions, and libtorch below PREFIX (/usr/local)
# make uninstall    removes what `make install` put below PREFIX
# make deb          builds two Debian packages in target/: offloadd, and offloadd-trainer with trainer and bench-io
# make bench        measures a drive, and the Python package beside plain PyTorch; with a GPU also beside DeepSpeed (as root)
# make python       builds the Python package in place
# make wheel        builds a wheel with the package and all programs in target/wheels, for systems with glibc 2.28 or newer; so does `pip install .`
# make test-wheel   builds the wheel, installs it into an empty environment and runs it
#
# Needs Rust, a C++ compiler, make and Python 3. libtorch is fetched into .libtorch on first use (545 MB) unless LIBTORCH names one, or
# LIBTORCH_USE_PYTORCH=1 takes the torch 2.11 that `python3` imports; `make clean` keeps it. The crates offload-api, offloadd,
# offload-client, swapper, kernels, training-state, training-settings and bench-io need no libtorch: `cargo test -p swapper` works without it and `make`.

JOBS ?= 2
CARGO := cargo
# A Python with maturin; `make test-tools` creates it.
PYTHON ?= .python/bin/python
# Of `make python` and `make wheel`: dev compiles sooner, and is slower.
PROFILE ?= release
BUILT := $(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
PROGRAMS := $(addprefix target/$(BUILT)/,offloadd trainer trainer-with-torch bench-io)
# Where `make install` puts programs; DESTDIR goes before it, as packagers use it.
PREFIX ?= /usr/local
INTO = $(DESTDIR)$(PREFIX)
# Where `make wheel` puts the wheel.
WHEELS ?= target/wheels
# What builds the wheel. It looks for its program beside Python's, and in pip's build environment that is on PATH.
MATURIN ?= $(PYTHON) -m maturin
IN_WHEEL := trainer/python/python/offloadd
# What the wheel's programs are linked with, and where they are built: the flags would replace what `make build` has compiled.
OLD_GLIBC := $(CURDIR)/target/glibc-2.28
WHEEL_TARGET := $(CURDIR)/target/wheel

# CI builds everything once.
ifdef CI
export CARGO_INCREMENTAL := 0
endif

# Seeds of both simulations: enough to find a broken core, few enough to wait for.
CHECK_SEEDS ?= 0..200

.PHONY: demo check test docs nightly test-tools test-counts deny build install uninstall deb python wheel test-wheel bench libtorch clean

demo: build
	trainer/demo.sh

build: libtorch
	$(CARGO) build -j$(JOBS) --release --workspace --bins

# A libtorch that LIBTORCH or LIBTORCH_USE_PYTORCH names stays where it is, and the programs find it there.
install: libtorch
	$(CARGO) build -j$(JOBS) --profile $(PROFILE) -p offloadd -p trainer -p trainer-torch -p bench-io
	install -D -s -t $(INTO)/bin $(PROGRAMS)
	install -d $(INTO)/share/man/man1 $(INTO)/share/man/man8 $(INTO)/share/bash-completion/completions
	target/$(BUILT)/offloadd man $(INTO)/share/man/man8
	target/$(BUILT)/trainer man $(INTO)/share/man/man1
	target/$(BUILT)/bench-io man $(INTO)/share/man/man1
	for program in offloadd trainer bench-io; do \
		target/$(BUILT)/$$program completions bash > $(INTO)/share/bash-completion/completions/$$program; \
	done
	@if [ -z "$(LIBTORCH)$(LIBTORCH_USE_PYTORCH)" ]; then \
		install -d $(INTO)/lib/libtorch/torch && cp -a .libtorch/torch/lib $(INTO)/lib/libtorch/torch && \
		cp -a .libtorch/nvidia $(INTO)/lib/libtorch; \
	fi
	@echo "installed offloadd, trainer and bench-io in $(INTO)/bin"

uninstall:
	rm -f $(addprefix $(INTO)/bin/,$(notdir $(PROGRAMS))) \
		$(addprefix $(INTO)/share/bash-completion/completions/,offloadd trainer bench-io) \
		$(INTO)/share/man/man8/offloadd.8 $(INTO)/share/man/man8/offloadd-*.8 \
		$(foreach program,trainer bench-io,$(INTO)/share/man/man1/$(program).1 $(INTO)/share/man/man1/$(program)-*.1)
	rm -rf $(INTO)/lib/libtorch
	@echo "removed offloadd, trainer and bench-io from $(INTO); settings and stores were kept"

python:
	$(CARGO) build -j$(JOBS) --profile $(PROFILE) -p offloadd-python -p offloadd
	cp target/$(BUILT)/lib_offloadd.so trainer/python/python/offloadd/_offloadd.abi3.so
	install -D -t $(IN_WHEEL)/bin target/$(BUILT)/offloadd

wheel: export CARGO_TARGET_DIR := $(WHEEL_TARGET)
wheel: export RUSTFLAGS := $(RUSTFLAGS) -Clink-arg=-B$(OLD_GLIBC) -Clink-arg=-L$(OLD_GLIBC) -Clink-arg=-Wl,--allow-shlib-undefined
wheel: PROGRAMS := $(PROGRAMS:target/%=$(WHEEL_TARGET)/%)
wheel: libtorch
	$(PYTHON) trainer/python/old_glibc/old_glibc.py $(OLD_GLIBC)
	$(CARGO) build -j$(JOBS) --profile $(PROFILE) -p offloadd -p trainer -p trainer-torch -p bench-io
	install -D -s -t $(IN_WHEEL)/bin $(PROGRAMS)
	install -D -m 644 -t trainer/python/licenses LICENSE-MIT LICENSE-APACHE
	.ci/licenses.py --cargo $(CARGO) --texts trainer/python/licenses/LICENSES-dependencies offloadd trainer trainer-torch bench-io offloadd-python
	$(MATURIN) build --profile $(PROFILE) --manifest-path trainer/python/Cargo.toml --out $(WHEELS) \
		--compatibility $$(trainer/python/wheel_tag.py $(PROGRAMS))

test-wheel:
	PYTHON=$(PYTHON) PROFILE=$(PROFILE) trainer/python/test-wheel.sh

deb: build
	offloadd/packaging/deb.sh offloadd target/release target
	offloadd/packaging/deb.sh offloadd-trainer target/release target

check: libtorch
	$(CARGO) fmt --all --check
	.ci/links.py
	.ci/words.py
	.ci/tidy.py
	trainer/bench/readme.py
	.ci/cycles.py
	.ci/ruff.sh
	$(CARGO) clippy -j$(JOBS) --workspace --all-targets -- -D warnings
	OFFLOADD_SEEDS=$(CHECK_SEEDS) SWAPPER_SEEDS=$(CHECK_SEEDS) $(CARGO) test -j$(JOBS) --workspace --lib --bins --test simulation

test: libtorch
	$(CARGO) fmt --all --check
	.ci/links.py
	.ci/words.py
	.ci/tidy.py
	trainer/bench/readme.py
	.ci/cycles.py
	.ci/ruff.sh
	$(CARGO) clippy -j$(JOBS) --workspace --all-targets -- -D warnings
	.ci/licenses.py --cargo $(CARGO)
	python3 .ci/test_tests.py -q
	$(CARGO) build -j$(JOBS) --workspace --lib --bins --tests
	OFFLOADD_BUILT=1 .ci/tests.py --cargo $(CARGO) --jobs $(JOBS) --beside trainer/python/test.sh

# With UPDATE_DOCS, the tests that compare pages write them.
docs: libtorch
	trainer/bench/picture.py
	trainer/bench/io/draw.py --stored
	UPDATE_DOCS=1 $(CARGO) test -j$(JOBS) --workspace --no-fail-fast --lib --bins docs -- --test-threads=1
	UPDATE_DOCS=1 trainer/python/test.sh -k test_docs

# Takes an hour or two more than `make test`.
nightly: export OFFLOADD_ALL_CASES ?= 1
nightly: export OFFLOADD_SEEDS ?= 0..200000
nightly: export SWAPPER_SEEDS ?= 0..400000
nightly: export OFFLOADD_RESTARTS ?= 200
nightly: export OFFLOADD_SOAK_SECONDS ?= 300
nightly: export OFFLOADD_POWER_IMAGES ?= 100000
nightly: export OFFLOADD_POWER_TRAININGS ?= 100
nightly: export OFFLOADD_KILLS ?= 200
nightly: export OFFLOADD_PARTITIONS ?= 50
nightly: test
	RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" \
		$(CARGO) doc -j$(JOBS) --workspace --no-deps --document-private-items
	$(MAKE) test-wheel

test-tools:
	@.ci/test-tools.sh

test-counts: libtorch
	.ci/tests.py --cargo $(CARGO) --jobs $(JOBS) --record

deny:
	$(CARGO) deny check

bench: build python
	target/release/bench-io scale --directory .
	@if [ ! -x $(PYTHON) ]; then \
		echo "skipped: the Python package: no $(PYTHON) with torch and transformers; make test-tools installs it (5 GB)"; exit; \
	fi; \
	$(PYTHON) trainer/bench/package/profile_units.py && \
	if nvidia-smi > /dev/null 2>&1; then $(PYTHON) trainer/bench/package/gpu_check.py speed --bin target/release; \
	else $(PYTHON) trainer/bench/table.py --model tiny pytorch-kept client-host; fi

libtorch:
ifeq ($(LIBTORCH)$(LIBTORCH_USE_PYTORCH),)
	@python3 kernels/fetch-libtorch.py .libtorch
endif

clean:
	$(CARGO) clean
