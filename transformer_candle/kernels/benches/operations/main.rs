//! Times the operations of a training step one by one on the CPU, beside what the machine itself can do. Prints one
//! JSON line per row.
//!
//! ```sh
//! cargo bench -p kernels --bench operations -- --threads 2
//! ```
//! `make bench-cpu` puts the rows beside PyTorch's.

// One call: a target function of the processor's own instruction for bf16 (`machine.rs`).
#![allow(unsafe_code)]
// Loops reach wide vectors only where they are inlined into a function compiled for them.
#![allow(clippy::inline_always)]

mod machine;
mod meter;
mod rows;
mod sizes;

use std::error::Error;
use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;
use std::process::{self, ExitCode};

use clap::Parser;
use kernels::DType;
use serde::Serialize;
use serde_json::json;

use machine::Machine;
use meter::Meter;
use sizes::Sizes;

/// Times the operations of a training step one by one.
#[derive(Debug, Parser)]
struct Options {
    /// The config whose sizes the operations have.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/cpu/s2.yaml"))]
    config: PathBuf,
    /// Threads to compute with. [default: one per core]
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    threads: usize,
    /// Seconds that a row is measured for.
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// What `cargo bench` says to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("operations: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let sizes = Sizes::load(&options.config)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build()?;
    let machine = Machine::measure(&pool, options.seconds);
    print(&json!({ "machine": machine }));
    for dtype in [DType::F32, DType::BF16] {
        let meter = Meter { machine: &machine, dtype, seconds: options.seconds };
        // In the pool, where the trainer's operations run too.
        pool.install(|| rows::all(&sizes, &meter))?;
    }
    Ok(())
}

/// Prints a row as one line of JSON. A reader that has gone away (`| head`) ends the program quietly.
fn print(row: &impl Serialize) {
    let line = serde_json::to_string(row).expect("a row is plain numbers and names");
    match writeln!(io::stdout(), "{line}") {
        Ok(()) => (),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => process::exit(0),
        Err(error) => {
            eprintln!("operations: cannot write to stdout: {error}");
            process::exit(1)
        }
    }
}
