# make demo    trains a Llama with all its state on two device files, kills everything mid-step, goes on
# make test    formatting, lints, every test; ends with what was skipped, and what passed only when run once more by itself
# make build   offloadd, trainer and bench-io in target/release
# make deb     a Debian package of offloadd in target/
#
# Needs Rust, a C++ compiler, make and Python 3. `make test-tools` installs what some tests need besides (as root with apt; 90 MB of
# NVRTC with pip); they skip without it. libtorch is fetched into .libtorch on first use (545 MB) unless LIBTORCH names one,
# or LIBTORCH_USE_PYTORCH=1 takes the torch 2.11 that `python3` imports.

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

test: libtorch
	$(CARGO) fmt --all --check
	$(CARGO) clippy -j$(JOBS) --workspace --all-targets -- -D warnings
	$(CARGO) build -j$(JOBS) --workspace --all-targets
	python3 .ci/test_tests.py -q
	.ci/tests.py --cargo $(CARGO) --jobs $(JOBS) --log $(TEST_LOG)

bench: build
	target/release/bench-io

libtorch:
ifeq ($(LIBTORCH)$(LIBTORCH_USE_PYTORCH),)
	@python3 kernels/fetch-libtorch.py .libtorch
endif

test-tools:
	@.ci/test-tools.sh

clean:
	$(CARGO) clean
