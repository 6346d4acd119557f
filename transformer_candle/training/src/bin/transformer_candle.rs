//! The trainer's command line. See `training::commands`.

use std::process::ExitCode;

fn main() -> ExitCode {
    training::commands::main()
}
