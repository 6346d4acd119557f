//! Saves a checkpoint with several ranks: the first one stages it, all write their optimizer state into the staging
//! directory, which all of them see, and the first one commits it once every file is durable and hashed.
//!
//! The ranks exchange three messages: where the staging directory is, what each has written, and how it ended. A rank that
//! fails says so in place of its message, so that all fail with the same sentence and nobody waits.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::manifest::FileRecord;
use super::staging::{Create, StagingDirectory};
use crate::error::checkpoint::{CheckpointError, Result};
use crate::ranks::Ranks;

/// What a rank sends in each exchange.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    /// The path of the staging directory.
    Staged(PathBuf),
    /// The name and record of a durable file.
    Written(String, FileRecord),
    /// No content: nothing has failed so far.
    Ready,
    Failed(String),
}

/// The number of exchanges of one save.
const EXCHANGES: usize = 3;

/// The first rank, which creates and commits the staging directory.
pub(super) struct Leader<'a> {
    ranks: &'a Ranks,
    /// Exchanges that the other ranks have taken part in.
    exchanges: usize,
}

/// Runs the first rank's part of a save and tells the others how it ended.
pub(super) fn lead(ranks: &Ranks, save: impl FnOnce(&mut Leader) -> Result<PathBuf>) -> Result<PathBuf> {
    let mut leader = Leader { ranks, exchanges: 0 };
    let saved = save(&mut leader);
    match &saved {
        Ok(_) => leader.tell(&Message::Ready).map(drop)?,
        // The other ranks know this error.
        Err(CheckpointError::OnRank { .. } | CheckpointError::RankLost(_)) => {}
        Err(error) if leader.exchanges < EXCHANGES => {
            // What another rank sends is of no use any more.
            let _ = leader.tell(&Message::Failed(error.to_string()));
        }
        Err(_) => {}
    }
    saved
}

impl Leader<'_> {
    /// Tells the other ranks the staging directory, for them to write into.
    pub(super) fn begin(&mut self, folder: &Path) -> Result<()> {
        self.tell(&Message::Staged(folder.to_owned())).map(drop)
    }

    /// Waits for the other ranks' files and lists them for the manifest.
    pub(super) fn collect(&mut self, staging: &mut StagingDirectory) -> Result<()> {
        for message in self.tell(&Message::Ready)? {
            if let Message::Written(name, record) = message {
                staging.list(name, record);
            }
        }
        Ok(())
    }

    fn tell(&mut self, message: &Message) -> Result<Vec<Message>> {
        self.exchanges += 1;
        exchange(self.ranks, message)
    }
}

/// Saves the part of every other rank: `write` adds its file to the staging directory, and returns the file's name.
pub(super) fn add_part(
    ranks: &Ranks,
    create: Create,
    write: impl FnOnce(&Path, &mut StagingDirectory) -> Result<String>,
) -> Result<()> {
    let Some(Message::Staged(folder)) = exchange(ranks, &Message::Ready)?.into_iter().next() else {
        return Err(CheckpointError::RankLost("rank 0 saves no checkpoint though this rank does".to_owned()));
    };
    let mut staging = StagingDirectory::of_another_rank(&folder, create);
    let outcome = write(&folder, &mut staging);
    let message = match &outcome {
        Ok(name) => Message::Written(name.clone(), staging.record(name).cloned().expect("it was written")),
        Err(error) => Message::Failed(error.to_string()),
    };
    exchange(ranks, &message)?;
    outcome?;
    exchange(ranks, &Message::Ready).map(drop)
}

/// Sends a message to all ranks and returns those of all, in rank order; fails if one of them says that it has failed.
fn exchange(ranks: &Ranks, own: &Message) -> Result<Vec<Message>> {
    let Some(exchange) = ranks.exchange() else { return Ok(Vec::new()) };
    let own = serde_json::to_string(own).map_err(|error| CheckpointError::RankLost(error.to_string()))?;
    let texts = exchange.gather(&own).map_err(|error| CheckpointError::RankLost(error.to_string()))?;
    let parsed =
        |text: &String| serde_json::from_str(text).map_err(|error| CheckpointError::RankLost(error.to_string()));
    let all: Vec<Message> = texts.iter().map(parsed).collect::<Result<_>>()?;
    for (rank, message) in all.iter().enumerate() {
        if let Message::Failed(message) = message {
            return Err(CheckpointError::OnRank { rank, message: message.clone() });
        }
    }
    Ok(all)
}
