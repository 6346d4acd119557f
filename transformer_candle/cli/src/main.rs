//! The program `transformer-candle`: what each command takes and does is in `training::commands` and `gpu_check`; here
//! they are put on one command line.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod gpu_check;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use training::commands::{Stdout, program};
use training::environment::VERSION;

/// Pre-train Llama-style language models.
#[derive(Debug, Parser)]
#[command(name = "transformer-candle", version = VERSION, max_term_width = 100)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Shared(training::commands::Command),
    /// Compare a GPU with the CPU: training, gradients, operations, memory.
    GpuCheck(gpu_check::GpuCheckOptions),
}

fn main() -> ExitCode {
    program::run(|CommandLine { command }, stop| match command {
        Command::Shared(command) => command.run(None, &mut Stdout, stop),
        Command::GpuCheck(options) => gpu_check::main(&options, &mut Stdout),
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use training::commands::arguments::parse_from;

    use super::*;

    fn parsed(arguments: &str) -> std::result::Result<CommandLine, clap::Error> {
        CommandLine::try_parse_from(std::iter::once("transformer-candle").chain(arguments.split_whitespace()))
    }

    #[test]
    fn the_declarations_are_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn every_flag_is_understood() {
        for arguments in [
            "train --config runs/e/training.yaml",
            "train -c a.toml --override runtime.seed=7 --override data.batch_size=2 --resume --device cpu --max-steps 5",
            "train --resume latest --config a.yaml",
            "train runs/e --resume --max-steps 10k",
            "train",
            "plan e --tokens 20B",
            "bench e --steps 1e2",
            "generate e --prompt x --max-tokens 1e3",
            "generate --prompt x",
            "validate-data",
            "checkpoint list e",
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
        assert!(refused("train a.yaml --config b.yaml").contains("cannot be used with"));
        assert!(refused("generate a --experiment b --prompt x").contains("cannot be used with"));
        assert!(refused("train --config a.yaml --device gpu").contains("cuda:N"));
        assert!(refused("train --config a.yaml --max-steps -1").contains("-1"));
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
          plan           Show what a config needs: memory, speed, time, disk, cost, and what would fit
          generate       Continue a text with a trained model
          evaluate       Measure a trained model's loss on held-out text
          bench          Measure a config's training speed on synthetic tokens
          validate-data  Prove from a run's ledger that every document was used exactly once
          checkpoint     List or verify checkpoints
          gpu-check      Compare a GPU with the CPU: training, gradients, operations, memory
          help           Print this message or the help of the given subcommand(s)

        Options:
          -h, --help     Print help
          -V, --version  Print version
        ");
    }

    fn checked(words: &[&str]) -> training::Result<()> {
        let words = std::iter::once("transformer-candle").chain(words.iter().copied());
        parse_from::<CommandLine>(words.map(Into::into)).map(drop)
    }

    #[test]
    fn an_empty_value_is_refused_by_its_name() {
        for (words, name) in [
            (&["evaluate", "--experiment", "e", "--input", "a", "--input", ""][..], "--input"),
            (&["evaluate", "--experiment", "", "--input", "a"], "--experiment"),
            (&["evaluate", "--experiment", "e", "--text-column", " "], "--text-column"),
            (&["train", "--config", "c", "--override="], "--override"),
            (&["train", "--config", ""], "--config"),
            (&["generate", "--checkpoint", "d", "--prompt-file", ""], "--prompt-file"),
            (&["validate-data", ""], "RUN"),
            (&["checkpoint", "list", ""], "RUN"),
        ] {
            let error = checked(words).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{words:?}");
            assert!(error.to_string().contains(name), "{words:?}: {error}");
        }
    }

    #[test]
    fn an_empty_prompt_starts_a_new_text() {
        checked(&["generate", "--experiment", "e", "--prompt", ""]).unwrap();
    }
}
