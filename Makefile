# make demo    trains a Llama with all its state on two device files, kills everything mid-step, goes on
# make test    formatting, lints, every test; ends with a list of what was skipped
# make build   offloadd, trainer and bench-io in target/release
# make deb     a Debian package of offloadd in target/
#
# Needs Rust, a C++ compiler, make and Python 3. What some tests need besides, .ci/test-tools.sh puts there where it may (as root with
# apt; 90 MB of NVRTC with pip); they skip without it. libtorch is fetched on first use (545 MB) unless LIBTORCH names one,
# or LIBTORCH_USE_PYTORCH=1 takes the torch 2.11 that `python3` imports.

SHELL := /bin/bash -o pipefail
JOBS ?= 2
CARGO := cargo
TEST_LOG := target/test.log

.PHONY: demo test build deb bench libtorch test-tools clean

demo: build
	configs/demo.sh

build: libtorch
	$(CARGO) build -j$(JOBS) --release --workspace --bins

deb:
	$(CARGO) build -j$(JOBS) --release -p offloadd
	offloadd/packaging/deb.sh target/release/offloadd target

test: libtorch test-tools
	$(CARGO) fmt --all --check
	$(CARGO) clippy -j$(JOBS) --workspace --all-targets -- -D warnings
	$(CARGO) build -j$(JOBS) --workspace --all-targets
	$(CARGO) test -j$(JOBS) --workspace --no-fail-fast -- --show-output 2>&1 | tee $(TEST_LOG); result=$$?; \
	  echo; echo "Skipped:"; grep -E '^skipped: ' $(TEST_LOG) | sort -u || echo "  nothing"; exit $$result

bench: build
	target/release/bench-io

libtorch:
ifeq ($(LIBTORCH)$(LIBTORCH_USE_PYTORCH),)
	@python3 kernels/fetch-libtorch.py target/libtorch
endif

test-tools:
	@.ci/test-tools.sh

clean:
	$(CARGO) clean
