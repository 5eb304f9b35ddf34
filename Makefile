# demo, test and bench need a Redis or Valkey server; .ci/with-redis finds or installs one.

# Most tests wait for leases rather than compute: more of them at once than there are cores.
export RUST_TEST_THREADS ?= 12

.PHONY: help demo test stress sim mutants chaos interop bench lint deny advisories oldest-rust package doc ci clean-cache

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: ## Run the flash-sale example (options: make demo ARGS="--help")
	bash .ci/with-redis --url-is-enough cargo run --package redisson-lock-examples --bin flash_sale -- $(ARGS)

test: ## Run all tests: unit, integration, examples and documentation (only some: make test ARGS=name)
	bash .ci/with-redis bash .ci/test $(ARGS)

stress: ## Run every test RUNS times (20) beside one busy loop for each core
	bash .ci/with-redis bash .ci/stress $(or $(RUNS),20) $(ARGS)

sim: ## Run whole clients in the simulation (SIM_SECONDS=60 SIM_SEED=any SIM_DEEPER=2)
	bash .ci/sim

mutants: ## Put each defect of .ci/mutants.list in, and see the simulation find it (MUTANT_SECONDS=60)
	python3 .ci/mutants

chaos: ## Run random faults against several processes, and judge (CHAOS_SECONDS=6..86400 CHAOS_SEED=any)
	CHAOS_SECONDS=$${CHAOS_SECONDS:-60} bash .ci/with-redis cargo test --all-features --test chaos -- --exact random_faults_break_no_promise --nocapture

interop: ## Run the scenarios side by side with every Redisson version and with redis-py (needs a JDK, Maven, Python)
	bash .ci/with-redis bash .ci/interop

bench: ## Run the benchmarks
	bash .ci/with-redis --url-is-enough cargo bench --package redisson-lock-bench

lint: ## Check formatting, words, comments, commits, and run clippy; a warning is an error
	bash .ci/lint

deny: ## Check the licences, bans and sources of the dependencies (deny.toml)
	bash .ci/deny

advisories: ## Check the dependencies for known vulnerabilities (needs the host of the database)
	bash .ci/deny advisories

oldest-rust: ## Build the library with the oldest Rust that it supports
	bash .ci/oldest-rust

package: ## Pack the library as it would be published, and check the list of files
	bash .ci/package

doc: ## Build the documentation; a warning is an error
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features

ci: ## Run everything that has to pass before a change lands
	bash .ci/run

clean-cache: ## Remove what was put into .cache: a server, cargo-deny, the oldest Rust
	rm -rf .cache
