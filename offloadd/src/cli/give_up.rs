//! `offloadd give-up`: a job goes on without a record that its device does not give.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use offload_api::ids::Generation;
use offload_api::proto;
use offloadd::stopped::Stopped;
use offloadd::store::definition::JobName;

use super::at_rest::{Holder, holder};
use super::connection::{refusal, runtime};
use super::open_all;

pub(crate) fn run(
    job: String,
    uid: Option<u32>,
    config: Option<PathBuf>,
    socket: Option<PathBuf>,
) -> Result<()> {
    let newest = runtime()?.block_on(async {
        match holder(config.as_deref(), socket).await? {
            Holder::Daemon(socket, mut client) => {
                let request = proto::GiveUpRequest {
                    job: job.clone(),
                    uid,
                };
                let answer = client.give_up(request).await;
                let reply = answer.map_err(|status| refusal(&socket, &status))?;
                Ok(Generation(reply.into_inner().newest_generation))
            }
            Holder::Nobody(config) => {
                let mut stopped = Stopped::open(open_all(&config.devices)?)?;
                let uid = uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
                let name = JobName::new(job.as_str()).map_err(|fault| anyhow!("{fault}"))?;
                (stopped.give_up(uid, name)).map_err(|fault| anyhow!("{}", fault.message))
            }
        }
    })?;
    println!(
        "{job} goes on from {}",
        match newest.0 {
            0 => "nothing: no other generation of it is in the store".to_owned(),
            newest => format!("generation {newest}, the newest that can be read"),
        }
    );
    Ok(())
}
