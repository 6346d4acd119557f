//! The command line: what each command takes is declared here, what it does is in its file. Commands are plain
//! functions over plain options, so that Python calls the same ones.

mod arguments;
pub mod bench;
pub mod checkpoint;
mod declared;
pub mod evaluate;
pub mod generate;
pub mod gpu_check;
mod model_source;
mod output;
pub mod plan;
pub mod train;
mod until_stopped;
pub mod validate_data;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::panic;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use self::until_stopped::until_stopped;
use crate::Result;
use crate::lock::RunLock;
use crate::stop::{self, StopSignal};
use crate::terminal::{LogWriter, escaped};

pub use declared::{DeclaredCommand, DeclaredOption, declared};
pub use model_source::ModelSource;
pub use output::{Output, Stdout};

/// Pre-train Llama-style language models.
#[derive(Debug, Parser)]
#[command(name = "transformer-candle", version = env!("BUILT_VERSION"), max_term_width = 100)]
pub struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

/// Train a model from a config file.
///
/// Streams the data set that `streaming_config.json` beside the config names; without that file it reads
/// `data.train_shards`.
#[derive(Debug, Parser)]
#[command(name = "train", version = env!("BUILT_VERSION"), max_term_width = 100)]
pub struct TrainCommandLine {
    #[command(flatten)]
    options: train::TrainOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model from a config file.
    ///
    /// Streams the data set that `streaming_config.json` beside the config names; without that file it reads
    /// `data.train_shards`.
    Train(train::TrainOptions),
    /// Tell what a config needs: parameters, memory by category, FLOPs, disk.
    Plan(plan::PlanOptions),
    /// Continue a text with a trained model.
    Generate(generate::GenerateOptions),
    /// Measure a trained model's loss on held-out text.
    Evaluate(evaluate::EvaluateOptions),
    /// Measure a config's training speed on synthetic tokens.
    Bench(bench::BenchOptions),
    /// Compare a GPU with the CPU: training, gradients, operations, memory.
    GpuCheck(gpu_check::GpuCheckOptions),
    /// Prove from a run's ledger that every document was used exactly once.
    ValidateData(validate_data::ValidateDataOptions),
    /// List or verify checkpoints.
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
}

/// The program `transformer-candle`.
pub fn main() -> ExitCode {
    guarded(|| {
        let command = arguments::parsed::<CommandLine>()?.command;
        until_stopped(|stop| command.run(None, &mut Stdout, stop))
    })
}

/// Runs the command that `words` say, the first of which is the program's name, and returns its exit code. Its answer goes
/// to `output`, its log to stderr.
///
/// `lock` is the run directory's, where the caller has taken it already and the command is `train`.
///
/// # Errors
/// [`TrainerError::Request`] for words that make no command; else whatever the command ends with.
pub fn run(
    words: impl IntoIterator<Item = OsString>,
    lock: Option<Arc<RunLock>>,
    output: &mut dyn Output,
    stop: &StopSignal,
) -> Result<u8> {
    log_to_stderr();
    arguments::parsed_from::<CommandLine>(words)?.command.run(lock, output, stop)
}

impl Command {
    fn run(self, lock: Option<Arc<RunLock>>, output: &mut dyn Output, stop: &StopSignal) -> Result<u8> {
        match self {
            Self::Train(options) => train::main(&options, lock, stop),
            Self::Plan(options) => plan::main(&options, output),
            Self::Generate(options) => generate::main(&options, output, stop),
            Self::Evaluate(options) => evaluate::main(&options, output, stop),
            Self::Bench(options) => bench::main(&options),
            Self::GpuCheck(options) => gpu_check::main(&options),
            Self::ValidateData(options) => validate_data::main(&options, output, stop),
            Self::Checkpoint(command) => checkpoint::main(&command, stop),
        }
    }
}

/// The program `train`: the command of that name on its own.
pub fn train_main() -> ExitCode {
    guarded(|| {
        let options = arguments::parsed::<TrainCommandLine>()?.options;
        until_stopped(|stop| train::main(&options, None, stop))
    })
}

/// Runs a command: logs and errors go to stderr, an error is one paragraph, a panic one sentence.
fn guarded(command: impl FnOnce() -> Result<u8> + panic::UnwindSafe) -> ExitCode {
    log_to_stderr();
    // Without it a limit on the size of files ends the program where it is met, which it may not be.
    let _ = stop::outlive_file_size_limit();
    panic::set_hook(Box::new(|panic| {
        let place = panic.location().map_or_else(String::new, |location| format!(" at {location}"));
        let reason = panic.payload_as_str().unwrap_or("no reason given").trim_end();
        print_error(&format!("internal error{place}: {reason}. This is a bug in transformer_candle; please report it"));
    }));
    match panic::catch_unwind(command) {
        Ok(Ok(code)) => ExitCode::from(code),
        Ok(Err(error)) => {
            print_error(&error);
            ExitCode::from(error.exit_code())
        }
        Err(_) => ExitCode::FAILURE,
    }
}

/// `error: ...` on stderr. Nobody reading it is no reason to fail differently.
pub fn print_error(error: &dyn Display) {
    let _ = writeln!(io::stderr(), "error: {}", escaped(&error.to_string()));
}

/// Prints text for people on stdout.
fn print(text: &str) -> Result<()> {
    (&mut Stdout as &mut dyn Output).print(text)
}

/// Prints a value on stdout as one line of JSON.
fn print_json(value: &impl serde::Serialize) -> Result<()> {
    (&mut Stdout as &mut dyn Output).print_json(value)
}

/// Warnings, or what `RUST_LOG` asks for.
fn log_to_stderr() {
    let filter = EnvFilter::builder().with_default_directive(tracing::Level::WARN.into()).from_env_lossy();
    // A log that is set up already, by whoever called, stays.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogWriter)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .try_init();
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parsed(arguments: &str) -> std::result::Result<CommandLine, clap::Error> {
        CommandLine::try_parse_from(std::iter::once("transformer-candle").chain(arguments.split_whitespace()))
    }

    #[test]
    fn the_declarations_are_consistent() {
        CommandLine::command().debug_assert();
        TrainCommandLine::command().debug_assert();
    }

    #[test]
    fn every_flag_is_understood() {
        for arguments in [
            "train --config runs/e/training.yaml",
            "train -c a.toml --override runtime.seed=7 --override data.batch_size=2 --resume --device cpu --max-steps 5",
            "train --resume latest --config a.yaml",
            "train --config a.yaml --resume runs/e/checkpoints/step-00000005 --device cuda:1",
            "plan --config a.yaml --json",
            "generate --checkpoint d --prompt x --max-tokens 5 --temperature 0 --top-k 4 --top-p 0.9 --seed 3 --json",
            "generate --experiment e --prompt-file f",
            "evaluate --experiment e",
            "evaluate --checkpoint d --input a.txt --input b.jsonl --json",
            "bench --config a.yaml --steps 3 --seconds 60",
            "bench --config a.yaml --device cuda:1",
            "gpu-check",
            "gpu-check --device cuda:1 --size small --only memory --only training --seed 7 --json",
            "validate-data runs/e --replay 3 --replay 4 --json",
            "checkpoint list --experiment e",
            "checkpoint verify runs/e/checkpoints",
        ] {
            assert!(parsed(arguments).is_ok(), "{arguments}: {}", parsed(arguments).unwrap_err());
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        let refused = |arguments: &str| {
            let error = parsed(arguments).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{arguments}");
            error.to_string()
        };
        assert!(refused("train").contains("--config"));
        assert!(refused("train --config a.yaml --device gpu").contains("cuda:N"));
        assert!(refused("train --config a.yaml --max-steps -1").contains("-1"));
        assert!(refused("generate --prompt x").contains("--experiment"));
        assert!(refused("generate --experiment e").contains("--prompt"));
        assert!(refused("generate --experiment e --checkpoint d --prompt x").contains("cannot be used with"));
        assert!(refused("bench --config a.yaml --steps 0").contains('0'));
        assert!(refused("bench --config a.yaml --seconds 0").contains("--seconds"));
        assert!(refused("gpu-check --only everything").contains("training, gradients, operations, memory"));
        assert!(refused("gpu-check --size huge").contains("small"));
        assert!(refused("trian").contains("train"));
    }

    #[test]
    fn the_help_says_what_each_command_is_for() {
        insta::assert_snapshot!(CommandLine::command().render_help(), @r"
        Pre-train Llama-style language models

        Usage: transformer-candle <COMMAND>

        Commands:
          train          Train a model from a config file
          plan           Tell what a config needs: parameters, memory by category, FLOPs, disk
          generate       Continue a text with a trained model
          evaluate       Measure a trained model's loss on held-out text
          bench          Measure a config's training speed on synthetic tokens
          gpu-check      Compare a GPU with the CPU: training, gradients, operations, memory
          validate-data  Prove from a run's ledger that every document was used exactly once
          checkpoint     List or verify checkpoints
          help           Print this message or the help of the given subcommand(s)

        Options:
          -h, --help     Print help
          -V, --version  Print version
        ");
    }
}
