# Thin names for scripts/ and the presets of CMakePresets.json. `make help` lists them.
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help demo test build server format format-check tidy asan ubsan tsan neon cuda install clean model-%

help:
	@echo "make demo          set everything up, build, fetch a small model, show it chatting and compare caches"
	@echo "make test          build everything and run all tests (fetches two more models, 720 MiB)"
	@echo "make build         only build the program (build/release/bin/kvmosaic)"
	@echo "make server        build the OpenAI-compatible server behind 'kvmosaic serve'"
	@echo "make model-NAME    fetch a model: tiny, small, base, swa"
	@echo "make format        format the C++ sources        make tidy    run clang-tidy"
	@echo "make asan          unit tests under address and undefined-behaviour sanitizers (also: ubsan, tsan)"
	@echo "make neon          64-bit ARM: cross-compiled, unit tests under qemu's user mode emulation"
	@echo "make cuda          the GPU backend and its tests (smoke set; skipped without a GPU)"
	@echo "make install       install to PREFIX (default /usr/local)"
	@echo "make clean         remove build/ (models and llama.cpp stay in the cache folder)"

demo:
	@scripts/deps.sh
	@scripts/llama.sh
	@scripts/build.sh release kvmosaic_program
	@scripts/fetch_model.py tiny
	@scripts/demo.sh

build:
	@scripts/deps.sh
	@scripts/llama.sh
	@scripts/build.sh release kvmosaic_program

test:
	@scripts/deps.sh
	@scripts/llama.sh --tools
	@scripts/build.sh release all llama-tools
	@for name in tiny small swa; do scripts/fetch_model.py $$name || exit 1; done
	@OMP_WAIT_POLICY=passive ctest --preset release --no-tests=error -j "$$(nproc)"

server:
	@scripts/deps.sh
	@scripts/llama.sh --tools
	@scripts/build.sh release llama-server

model-%:
	@scripts/fetch_model.py $*

format:
	@scripts/format.sh

format-check:
	@scripts/format.sh --check

tidy:
	@scripts/deps.sh --dev
	@scripts/tidy.sh

asan ubsan tsan:
	@scripts/deps.sh
	@scripts/build.sh $@ kvmosaic_tests
	@ctest --preset $@ -L unit --no-tests=error

neon:
	@scripts/deps.sh --dev
	@scripts/build.sh neon kvmosaic_tests
	@ctest --preset neon -L unit --no-tests=error -j "$$(nproc)"

cuda:
	@scripts/build.sh cuda
	@ctest --preset cuda --no-tests=error

PREFIX ?= /usr/local
install: build
	@cmake --install build/release --prefix "$(PREFIX)" > build/release/install.log && echo "installed to $(PREFIX)"

clean:
	@rm -rf build
