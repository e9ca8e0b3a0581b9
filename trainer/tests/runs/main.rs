//! Whole runs of the built `trainer`, and of `offloadd` beside it, as a user starts them. Each module's header says what
//! could go wrong there and how it would be found.

mod activations;
mod advice;
mod bits;
mod cuts;
mod daemon;
mod damage;
mod data;
mod deepspeed;
mod divergence;
mod export;
mod figures;
mod installed;
mod killed;
mod lab;
mod leftovers;
mod memory;
mod model_folder;
mod models;
mod overflow;
mod parity;
mod plan;
mod points;
mod private_files;
mod random;
mod rank_points;
mod ranks;
mod ranks_gpu;
mod restart;
mod resume;
mod said;
mod saves;
mod settings;
mod stages;
mod timeline;
mod weights;
