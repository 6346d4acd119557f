//! `train --config FILE`, for `cargo run -p training --bin train -- --config FILE`.

use std::process::ExitCode;

fn main() -> ExitCode {
    training::commands::train::program()
}
