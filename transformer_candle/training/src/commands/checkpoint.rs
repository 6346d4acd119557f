//! `checkpoint list` and `checkpoint verify`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::model_source::{checkpoints_in, experiment_folder};
use super::output::print_error;
use super::{NamedRun, Output};
use crate::Result;
use crate::checkpoint::{self, Checkpoint, CheckpointEntry, CheckpointError};
use crate::stop::StopSignal;

/// What can be asked about checkpoints.
#[derive(Debug, Clone, Subcommand)]
pub enum CheckpointCommand {
    /// List the checkpoints of a run: step, size, which one is the latest and which the best.
    List(CheckpointLocation),
    /// Read every byte of a checkpoint, or of all of a run, and compare it with what was written.
    Verify(CheckpointLocation),
}

/// Where to look.
#[derive(Debug, Clone, Args)]
#[group(multiple = false)]
pub struct CheckpointLocation {
    /// A run: its name or its directory; a checkpoint or a folder of checkpoints. [default: the newest run]
    #[arg(value_name = "RUN")]
    pub run: Option<PathBuf>,
    /// An experiment's name.
    #[arg(long, value_name = "NAME")]
    pub experiment: Option<String>,
}

/// Lists or verifies checkpoints; returns the exit code.
pub(super) fn main(command: &CheckpointCommand, output: &mut dyn Output, stop: &StopSignal) -> Result<u8> {
    match command {
        CheckpointCommand::List(location) => {
            let (directory, checkpoints) = location.checkpoints()?;
            output.print(&table(&directory, &checkpoints))?;
            Ok(0)
        }
        CheckpointCommand::Verify(location) => verify(&location.checkpoints()?.1, output, stop),
    }
}

impl CheckpointLocation {
    /// Returns the folder of checkpoints and the checkpoints at this location, at least one.
    fn checkpoints(&self) -> Result<(PathBuf, Vec<CheckpointEntry>)> {
        let folder = match (&self.run, &self.experiment) {
            (None, Some(name)) => experiment_folder(name)?,
            (run, _) => NamedRun::find_or_newest(run.as_deref())?.model_folder()?,
        };
        if let Some(one) = CheckpointEntry::from_path(&folder) {
            return Ok((folder.parent().unwrap_or(&folder).to_owned(), vec![one]));
        }
        let directory = checkpoints_in(&folder);
        let checkpoints = checkpoint::list(&directory)?;
        if checkpoints.is_empty() {
            return Err(CheckpointError::Absent { directory }.into());
        }
        Ok((directory, checkpoints))
    }
}

fn table(directory: &Path, checkpoints: &[CheckpointEntry]) -> String {
    let (latest, best) = (checkpoint::latest(directory), checkpoint::best(directory));
    let mut text = String::new();
    for checkpoint in checkpoints {
        let size = match checkpoint.bytes() {
            Ok(bytes) => format!("{:>10.1} MB", bytes as f64 / 1e6),
            Err(_) if checkpoint::is_removed(&checkpoint.path) => continue,
            Err(_) => "corrupted".to_owned(),
        };
        let is = |pointer: &Option<PathBuf>| pointer.as_ref() == Some(&checkpoint.path);
        let marks = [("latest", is(&latest)), ("best", is(&best))];
        let marks: Vec<&str> = marks.into_iter().filter_map(|(mark, set)| set.then_some(mark)).collect();
        let line = format!("{}  {size:>13}  {}", checkpoint.path.display(), marks.join(" "));
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// Verifies checkpoints and prints one line for each; returns the exit code, 5 if one of them is corrupted.
fn verify(checkpoints: &[CheckpointEntry], output: &mut dyn Output, stop: &StopSignal) -> Result<u8> {
    let mut code = 0;
    for CheckpointEntry { path, .. } in checkpoints {
        match verdict(path, stop) {
            Ok(verdict) => output.print(&format!("{}  {verdict}\n", path.display()))?,
            Err(CheckpointError::Interrupted) => return Err(CheckpointError::Interrupted.into()),
            Err(_) if checkpoint::is_removed(path) => {
                output.print(&format!("{}  removed by its run meanwhile\n", path.display()))?;
            }
            Err(error) => {
                print_error(&error);
                code = error.exit_code();
            }
        }
    }
    Ok(code)
}

/// Verifies every byte of a checkpoint; returns what is said of an intact one.
fn verdict(path: &Path, stop: &StopSignal) -> checkpoint::Result<String> {
    let checkpoint = Checkpoint::open(path)?.verified(&stop.cancel_token())?;
    // The manifest does not list itself.
    let count = checkpoint.manifest()?.files.len() + 1;
    let foreign = checkpoint.foreign_files()?;
    let beside =
        if foreign.is_empty() { String::new() } else { format!("; not written with it: {}", foreign.join(", ")) };
    Ok(format!("intact, {count} files{beside}"))
}
