//! The words of the command line: parsed, and checked for what no option takes.

use std::ffi::OsString;
use std::io::Write;
use std::process;

use clap::parser::ArgMatches;
use clap::{Command, CommandFactory, FromArgMatches};

use super::output;
use crate::{Result, TrainerError};

/// An empty prompt starts a new text.
const MAY_BE_EMPTY: [&str; 1] = ["prompt"];

/// What was typed, the program's name first. Help and version are printed here, and end the program.
///
/// # Errors
/// [`TrainerError::Request`] for what cannot be understood, and for a value that is empty, as a shell variable is that was never
/// set: an empty path would be the current folder.
pub fn parse_from<C: CommandFactory + FromArgMatches>(words: impl Iterator<Item = OsString>) -> Result<C> {
    let mut command = C::command();
    let matches = command.try_get_matches_from_mut(words).map_err(|error| told(&error))?;
    refuse_empty(&command, &matches)?;
    C::from_arg_matches(&matches).map_err(|error| told(&error.format(&mut command)))
}

fn told(error: &clap::Error) -> TrainerError {
    if error.use_stderr() {
        let text = error.render().to_string();
        return TrainerError::Request(text.trim_start_matches("error: ").trim_end().to_owned());
    }
    let printed = error.print().and_then(|()| std::io::stdout().flush());
    match output::delivered(printed) {
        Ok(()) => process::exit(0),
        Err(error) => error,
    }
}

fn refuse_empty(command: &Command, matches: &ArgMatches) -> Result<()> {
    for argument in command.get_arguments() {
        let name = argument.get_long().map_or_else(|| argument.get_id().to_string(), |long| format!("--{long}"));
        let may_be_empty = argument.get_long().is_some_and(|long| MAY_BE_EMPTY.contains(&long));
        let mut typed = matches.get_raw(argument.get_id().as_str()).into_iter().flatten();
        if !may_be_empty && typed.any(|value| value.to_string_lossy().trim().is_empty()) {
            return Err(TrainerError::Request(format!(
                "{name} is empty: give it a value or leave it out (a shell variable that is not set is typed as nothing)"
            )));
        }
    }
    match matches.subcommand() {
        Some((name, matches)) => command.find_subcommand(name).map_or(Ok(()), |inner| refuse_empty(inner, matches)),
        None => Ok(()),
    }
}
