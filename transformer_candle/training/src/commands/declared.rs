//! The options of the commands, for a program that offers them under its own name, as `orchestrate` does.

use clap::builder::StyledStr;
use clap::{Arg, ArgAction, Command, CommandFactory};
use serde::Serialize;

use super::CommandLine;

/// A command with its options and arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeclaredCommand {
    /// Its name.
    pub name: String,
    /// What it does, in a sentence.
    pub about: String,
    /// Its options and arguments.
    pub options: Vec<DeclaredOption>,
}

/// An option, or a positional argument.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeclaredOption {
    /// Its name in programs, such as `max_tokens` for `--max-tokens`.
    pub name: String,
    /// Its names on the command line, such as `--config` and `-c`; none for an argument.
    pub flags: Vec<String>,
    /// The placeholder of its value in a help text; none for a flag that takes no value.
    pub value: Option<String>,
    /// What it does, with its default.
    pub help: String,
    /// Whether it may be given again.
    pub repeatable: bool,
    /// Whether it must be given.
    pub required: bool,
}

/// Returns the commands that take options, in the order of the help text.
pub fn declared() -> Vec<DeclaredCommand> {
    let mut program = CommandLine::command();
    program.build();
    program.get_subcommands().filter(|command| !command.has_subcommands()).map(command).collect()
}

fn command(command: &Command) -> DeclaredCommand {
    let of_clap = |argument: &&Arg| matches!(argument.get_action(), ArgAction::Help | ArgAction::HelpShort);
    DeclaredCommand {
        name: command.get_name().to_owned(),
        about: sentence(command.get_about()),
        options: command.get_arguments().filter(|argument| !of_clap(argument)).map(option).collect(),
    }
}

fn option(argument: &Arg) -> DeclaredOption {
    let long = argument.get_long().map(|long| format!("--{long}"));
    let short = argument.get_short().map(|short| format!("-{short}"));
    let takes_value = argument.get_action().takes_values();
    let default = argument.get_default_values().first().filter(|_| takes_value);
    let default = default.map_or_else(String::new, |value| format!(" [default: {}]", value.display()));
    DeclaredOption {
        name: argument.get_long().map_or_else(|| argument.get_id().to_string(), |long| long.replace('-', "_")),
        flags: long.into_iter().chain(short).collect(),
        value: argument.get_value_names().filter(|_| takes_value).map(|names| names.join(" ")),
        help: sentence(argument.get_help()) + &default,
        repeatable: matches!(argument.get_action(), ArgAction::Append),
        required: argument.is_required_set(),
    }
}

/// Returns a help text with the full stop that clap takes away.
fn sentence(text: Option<&StyledStr>) -> String {
    let text = text.map_or_else(String::new, ToString::to_string);
    if text.ends_with(['.', ']']) { text } else { text + "." }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_declares_its_options() {
        let commands = declared();
        let names: Vec<_> = commands.iter().map(|command| command.name.as_str()).collect();
        assert_eq!(names, ["train", "plan", "generate", "evaluate", "bench", "validate-data"]);
        for command in &commands {
            assert!(command.about.len() > 1, "{}", command.name);
            for option in &command.options {
                assert!(option.help.len() > 1, "{} {}", command.name, option.name);
                assert!(!option.flags.is_empty() || option.name == "run", "{} {}", command.name, option.name);
            }
        }
        let [run, config, ..] = commands[0].options.as_slice() else { unreachable!() };
        assert_eq!((run.value.as_deref(), run.flags.len(), run.required), (Some("RUN"), 0, false));
        assert_eq!(config.flags, ["--config", "-c"]);
        assert_eq!((config.value.as_deref(), config.repeatable, config.required), (Some("FILE"), false, false));
    }

    #[test]
    fn a_default_is_part_of_the_help() {
        let generate = &declared()[2];
        let option = |name: &str| generate.options.iter().find(|option| option.name == name).unwrap();
        assert!(option("max_tokens").help.ends_with("at most. [default: 128]"), "{}", option("max_tokens").help);
        assert!(option("json").value.is_none() && !option("json").help.contains("default"));
    }
}
