"""Which tests run at each tier: `check` in two minutes, `test` in ten, `all` of them, and `rest`,
which is `all` without `test`. README.md says how the shares were found. `whole` also has the tests
that `all` leaves to commands of their own.

A share is a number n: every n-th case of a test runs; and of cases that differ only by dtype, one
runs, each in turn. So a feature that is tested in four dtypes is tested in one, and its neighbour
in the next. The first case of every test is in every share but NONE.
"""

from pathlib import Path

ALL, NONE = "all", 0
TIERS = ("check", "test", "rest", "all", "whole")
DEFAULT = (4, 3)  # for files that are not in the table
OF_PACKAGE = (4, ALL)  # for those of tests/package, which are of names and files

# File, or file::test: its shares in `check` and in `test`.
SHARES = {
    # The CPU kernels: every feature in one dtype, and some of the pairs.
    "test_features": (11, 2),
    "test_features::test_features": (1, 1),
    "test_features::test_triples_of_features": (5, 2),
    "test_features::test_edge_cases": (NONE, 2),
    "test_wide_head_dims": (NONE, 9),
    "test_selected": (29, 11),
    "test_paged_gradients": (NONE, 1),
    "test_selected::test_compiled": (NONE, NONE),
    # Values of each size, number and pair at once.
    "test_every_code": (11, ALL),
    "test_every_count": (11, ALL),
    "test_single_pairs": (5, ALL),
    "test_place::test_functions_count_in_the_larger_call": (4, ALL),
    "test_place::test_rows_that_end_where_keys_end": (4, ALL),
    "test_qv::test_columns_side_by_side_are_read_in_place": (ALL, ALL),
    "test_layouts::test_lazy_values_are_read": (4, ALL),
    "test_isa_choice::test_one_set_decodes_for_another": (4, 2),
    "test_selection": (11, 5),
    "test_selection::test_compiled": (NONE, NONE),
    "test_selection::test_operators_are_those_that_compilers_expect": (NONE, 2),
    "test_features::test_pairs_of_features": (37, 4),
    "test_weights": (23, 5),
    "test_decode": (11, 3),
    "test_derivatives": (4, 3),
    "test_derivatives::test_features": (13, 11),
    "test_derivatives::test_pairs_of_features": (NONE, 97),
    "test_derivatives::test_attention_jvp_compiles_once_for_every_size": (NONE, NONE),
    "test_derivatives::test_attention_jvp_compiles_whole_and_is_differentiable": (NONE, 3),
    "test_transforms::test_the_table_of_transforms": (NONE, 2),
    "test_vmap_dropout": (7, 2),
    "test_vmap_dropout::test_it_compiles_as_one_graph": (NONE, NONE),
    "test_sinks": (13, 1),
    "test_score_mod_edges": (13, 1),
    "test_program_derivatives": (4, ALL),
    "test_special_values": (5, 5),
    "test_special_values::test_rows_far_from_zero": (13, 7),
    "test_dense_masks": (9, 5),
    "test_property": (4, 2),
    "test_fuzz": (ALL, ALL),
    "test_fuzz::test_half_a_minute_of_random_calls": (NONE, NONE),
    "test_property::test_any_bad_call_is_refused": (4, 3),
    "test_padding::test_skipped_blocks": (4, 4),
    "test_property::test_derivatives_of_any_call_agree_with_each_other": (NONE, NONE),
    "test_error_budget": (11, 3),
    "test_oracle": (7, 2),
    "test_cpu_mutants": (NONE, 1),
    "test_cpu_mutants::test_a_fault_is_detected": (NONE, 147),
    "test_cpu_mutants::test_a_fault_on_tiles_is_detected": (NONE, NONE),
    "test_tangents": (17, 5),
    "test_tangents::test_features": (8, 3),
    "test_tangents::test_pairs_of_features": (NONE, 29),
    "test_tangents::test_the_worst_error_in_float64": (NONE, NONE),
    "test_selected_mutants": (NONE, 7),
    "test_selected_mutants::test_a_fault_in_python_is_detected": (NONE, NONE),
    "test_selected_mutants::test_a_fault_is_detected": (NONE, NONE),
    "test_tangent_mutants": (NONE, NONE),
    "test_tangent_mutants::test_a_fault_is_detected": (NONE, NONE),
    "test_score_mod_mutants": (NONE, NONE),  # each imports torch
    "test_amx_bf16_split_mutants": (NONE, 1),
    "test_amx_bf16_split_mutants::test_a_fault_of_bf16_splits_is_detected": (NONE, NONE),
    "test_amx_bf16_split_mutants::test_the_source_without_faults_of_bf16_splits_passes": (
        NONE,
        NONE,
    ),
    "test_packed": (7, 3),
    "test_packed_torch": (7, 3),
    "test_argument_shapes": (23, 4),
    "test_argument_shapes::test_every_shape_in_every_pass": (23, 2),
    "test_argument_shapes::test_every_shape_is_mapped": (4, ALL),
    "test_argument_shapes::test_a_mask_of_columns_that_sequences_share": (ALL, ALL),
    "test_storage": (7, 3),
    "test_int4": (7, 3),
    "test_int8_rows": (4, 2),
    "test_int4_rows": (4, ALL),
    "test_int4_errors": (4, ALL),
    "test_int4_cache": (4, 2),
    "test_new_rows": (7, 2),
    "test_key_offset": (4, 2),
    "test_key_offset::test_compiled": (NONE, NONE),  # half a minute
    "test_huge_pages": (4, ALL),
    "test_storage_error": (NONE, 2),
    "test_amx": (5, ALL),
    "test_strips": (11, 3),
    "test_amx_kernels": (5, 3),
    "test_amx_kernels::test_loads_for_each_product": (5, NONE),
    "test_amx::test_a_changed_rule_of_the_model_is_detected": (NONE, 17),
    "test_amx_kernels::test_a_fault_in_the_assembly_is_detected": (NONE, NONE),
    "test_amx_kernels::test_the_assembly_gives_the_bits_of_the_model": (NONE, NONE),
    "test_amx_bf16_split": (20, 2),
    "test_amx_bf16_split_blocks": (20, 2),
    "test_amx_bf16_split_ranges": (20, 2),
    "test_amx_bf16_split_unseen": (20, 2),
    "test_interruption": (NONE, 2),
    # Each worker starts four ranks, which takes ten seconds.
    "test_distributed": (NONE, 7),
    "test_distributed::test_features": (NONE, 71),
    "test_distributed::test_all_features_together": (NONE, 29),
    "test_distributed::test_sizes": (NONE, 17),
    "test_distributed::test_the_table_of_equality": (NONE, 2),
    "test_distributed::test_cut_tensors_are_joined_again": (NONE, 3),
    "test_distributed::test_layouts": (2, ALL),
    "test_distributed::test_every_shape_of_a_mask": (NONE, 2),
    "test_distributed_packed": (NONE, 7),
    "test_distributed_packed::test_every_shape_of_a_mask_of_packed_batches": (NONE, NONE),
    "test_distributed_errors": (NONE, 11),
    "test_distributed_errors::test_packed_batches_that_raise": (NONE, NONE),
    "test_distributed_functions": (NONE, 31),
    "test_cost_model": (NONE, ALL),
    "test_cost_model::test_bytes_are_those_that_leave": (NONE, NONE),
    "test_parallel_models": (NONE, 5),
    "test_parallel_models::test_compiled": (NONE, NONE),
    "test_dtensor": (NONE, 5),
    "test_dtensor::test_features": (NONE, 97),
    "test_dtensor::test_all_features_together": (NONE, 11),
    "test_dtensor::test_the_table": (NONE, ALL),
    # CUDA: the emulator takes a minute to build, and nvcc takes many.
    "test_sanitize_cpu": (5, 2),
    "test_sanitize_cpu::test_the_line_of_a_fault_is_in_its_file": (ALL, ALL),
    "test_sanitize_cpu::test_a_fault_is_detected": (NONE, NONE),  # they build libraries
    "test_sanitize_cpu::test_the_source_without_faults_passes": (NONE, NONE),
    "test_cuda_addresses": (NONE, NONE),  # builds an emulator that checks addresses
    "test_cuda_decode": (NONE, 13),
    "test_cuda_dense_masks": (NONE, NONE),
    "test_cuda_dense_masks::test_dense_masks": (NONE, 13),
    "test_cuda_emulated": (NONE, 23),
    "test_cuda_emulated::test_each_site_deleted_is_caught": (NONE, NONE),
    "test_cuda_emulated::test_features": (NONE, 7),
    "test_cuda_kernel_classes": (NONE, 3),
    "test_preference": (NONE, ALL),
    "test_sm90_check": (NONE, 2),
    "test_contact_emulated": (NONE, NONE),
    "test_contact_emulated::test_kernels_of_sm_90_read_nothing_behind_sequences": (NONE, NONE),
    "test_cuda_launch": (NONE, 4),
    "test_cuda_launch::test_each_failing_call_is_reported": (NONE, NONE),
    "test_cuda_library": (NONE, NONE),
    "test_cuda_packed": (NONE, 13),
    "test_cuda_scale": (NONE, 5),
    "test_cuda_stub": (NONE, ALL),
    "test_cuda_suites": (NONE, 59),
    "test_cuda_weights": (NONE, 59),
    "test_cuda_weights::test_each_site_deleted_is_caught": (NONE, NONE),
    "test_first_call": (NONE, ALL),
    # flash-attn's API: pairs of arguments; and transformers, which takes seconds to import.
    "test_flash_attn": (7, 2),
    "test_flash_attn_cache": (11, 2),
    "test_flash_attn_install::test_transformers_finds_the_installed_flash_attn": (NONE, NONE),
    "test_flash_attn_models": (NONE, 2),
    "test_latent_models": (NONE, 3),
    "test_flash_attn_passes::test_diffusers_runs_its_flash_backend": (NONE, ALL),
    "test_flash_attn_models::test_continuous_batching": (NONE, 3),
    "test_intervals": (4, 2),
    "test_flex_attention": (10, 4),
    "test_score_mods": (23, 5),  # each operator on each instruction set
    "test_functions_of_attention": (5, 2),
    "test_functions_compiled": (NONE, 23),
    "test_functions_compiled::test_every_operator": (NONE, 97),
    "test_functions_compiled::test_one_graph_with_the_bits_of_eager_code": (NONE, 61),
    "test_flex_attention::test_second_derivatives": (NONE, NONE),
    # Models of other libraries, which take seconds to import.
    "test_flex_transformers": (NONE, 5),
    "test_libraries": (NONE, 4),
    "test_libraries::test_the_environment_of_diffusers": (NONE, NONE),
    "test_profile": (4, 2),
    "test_profile_models": (4, 2),
    "test_profile::test_a_model_of_transformers": (NONE, ALL),
    "test_integration_transformers": (NONE, 11),
    "test_integration_transformers_batching": (NONE, 2),
    "test_integration_transformers_masks": (NONE, ALL),
    "test_integration_transformers_calls": (NONE, ALL),
    "test_transformers_forms": (NONE, ALL),
    "test_integration_transformers_masks::test_results_equal_those_of_the_dense_mask": (NONE, 5),
    "test_integration_transformers_calls::test_compiled": (NONE, NONE),
    "test_integration_transformers_calls::test_weights_of_compiled_models": (NONE, NONE),
    "test_first_contact": (NONE, NONE),
    "test_gpu_session::test_the_rehearsal_runs_from_end_to_end": (NONE, NONE),
    "test_gpu_session::test_a_part_that_hangs_is_killed_with_its_children": (NONE, NONE),
    "test_emulator": (NONE, NONE),
    "test_emulator::test_a_fault_of_the_emulator_is_detected": (NONE, NONE),
    "test_emulator_banks": (NONE, 3),
    "test_emulator_misuse": (NONE, NONE),
    "test_emulator_hopper": (NONE, ALL),
    "test_tensor_maps": (NONE, ALL),
    "test_probe": (NONE, 5),
    "test_probe90": (NONE, NONE),
    "test_gpu_mutants": (NONE, NONE),
    "test_gpu_mutants::test_a_fault_of_a_kernel_is_detected": (NONE, NONE),
    "test_gpu_mutants::test_a_fault_of_the_assembly_is_detected": (NONE, NONE),
    "test_gpu_mutants::test_a_fault_of_the_launch_path_is_detected": (NONE, NONE),
    "test_gpu_mutants::test_a_fault_of_a_compiled_kernel_is_detected": (NONE, NONE),
    "test_gpu_mutants::test_a_fault_of_a_hopper_kernel_is_detected": (NONE, NONE),
    "test_gpu_mutants::test_the_source_without_faults_passes": (NONE, NONE),
    # Compiled kernels on the emulator. Each takes seconds to compile, the first time.
    "test_ptx_cuda": (NONE, NONE),
    "test_ptx_cuda::test_features": (NONE, NONE),
    "test_ptx_foreign": (NONE, 24),
    **dict.fromkeys(("test_ptx_blackwell", "test_ptx_blackwell_misuse"), (NONE, 11)),
    "test_ptx_blackwell_faults": (NONE, NONE),
    **dict.fromkeys(("test_ptx_hopper", "test_ptx_blackwell_values"), (NONE, ALL)),
    "test_ptx_hopper_misuse": (NONE, ALL),
    "test_ptx_hopper_faults": (NONE, NONE),
    "test_ptx_bulk": (NONE, ALL),
    "test_ptx_bulk_misuse": (NONE, ALL),
    "test_ptx_bulk_faults": (NONE, NONE),
    "test_ptx_ours": (NONE, ALL),
    "test_triton_launch": (4, 4),
    "test_ptx_warpgroups": (NONE, ALL),
    "test_ptx_machine": (NONE, NONE),
    "test_ptx_refusals": (NONE, ALL),
    "test_ptx_products": (NONE, 3),
    # One plain kernel of head dim 64 in bfloat16: others take minutes to compile.
    "test_ptx_sm90": (NONE, NONE),
    "test_ptx_sm90::test_every_schedule_gives_the_same_bits": (NONE, NONE),
    "test_ptx_sm90::test_nan_behind_a_length_is_not_read": (NONE, NONE),
    "test_ptx_sm90::test_expanded_tensors": (NONE, NONE),
    "test_ptx_sm90_backward": (NONE, NONE),
    "test_ptx_sm90_backward::test_every_schedule_gives_the_same_bits": (NONE, NONE),
    "test_ptx_sm90_decode": (NONE, NONE),  # the same
    "test_ptx_sm90_decode::test_rows_and_heads_of_a_tile": (NONE, 13),
    "test_ptx_sm90_decode::test_any_number_of_splits": (NONE, 5),
    "test_ptx_sm90_decode::test_packed": (NONE, 5),
    "test_ptx_sm90_decode::test_pages": (NONE, 4),
    "test_ptx_sm90_decode::test_every_schedule_gives_the_same_bits": (NONE, 2),
    "test_ptx_sm90_decode::test_nan_behind_a_length_is_not_read": (NONE, 4),
    "test_ptx_sm90_decode::test_number_of_splits": (NONE, ALL),
    "test_ptx_triton": (NONE, NONE),
    "test_ptx_triton::test_features": (NONE, 211),
    "test_ptx_triton_functions": (NONE, NONE),
    "test_ptx_triton::test_every_ordering_instruction_of_the_forward_is_needed": (NONE, NONE),
    "test_ptx_values": (NONE, NONE),
    "test_ptxas": (2, ALL),
    "test_ptxas::test_the_kernels_spill_no_more_than_allowed": (NONE, NONE),
    # Triton's kernels compiled: one case for each chip. Whole tables: `make aot`.
    "test_aot": (4, ALL),
    "test_aot::test_compiles_within_its_budget": (NONE, 23),
    "test_aot::test_products_are_those_of_the_chip": (NONE, NONE),
    "test_aot::test_every_pass_is_compiled": (NONE, NONE),
    "test_ledger": (4, ALL),
    "test_ledger::test_nvcc_stays_within_the_budget": (NONE, NONE),
    "test_ledger::test_triton_stays_within_the_budget": (NONE, NONE),
    # Programs that start others, and training.
    "test_bench": (4, 3),
    "test_bench::test_a_run_records_the_machine_and_versions": (NONE, NONE),
    "test_bench_commands": (4, 4),
    "test_bench_files": (4, 2),
    "test_bench_files::test_a_run_ends_with_its_ratios_and_the_machine": (NONE, ALL),
    "test_bench_files::test_wall_times_of_a_busy_machine_are_left_out": (NONE, ALL),
    "test_bench_files::test_other_processes_are_counted": (NONE, ALL),
    "test_bench_files::test_titles_and_legends_are_inside_of_pictures": (NONE, ALL),
    "test_bench_targets": (4, 2),
    "test_bench_commands::test_the_ten_calls_run": (NONE, NONE),
    "test_bench_commands::test_models_hold_ours_against_sdpa": (NONE, NONE),
    "test_bench_commands::test_derivatives_hold_ours_against_torchs_math_path": (NONE, NONE),
    "test_bench_commands::test_distributed_holds_ranks_against_one_and_simulates": (NONE, NONE),
    "test_bench_commands::test_the_simulation_is_near_published_times": (ALL, ALL),
    "test_bench_commands::test_memory_records_the_reason_of_a_failed_probe": (NONE, NONE),
    "test_bench_commands::test_overhead_measures_small_lengths": (NONE, NONE),
    "test_engines": (4, 3),
    "test_engines::test_an_installed_engine_has_the_oracles_numbers": (NONE, NONE),
    "test_bench_compiling": (NONE, ALL),
    "test_core_scaling": (4, ALL),
    "test_bench_gpu": (NONE, 2),
    "test_bench_process": (NONE, 2),
    "test_bench_process::test_a_peer_that_crashes_loses_only_its_own_entry": (NONE, NONE),
    "test_bench_verify": (5, 3),
    "test_broken_library": (NONE, 5),
    "test_char_lm": (NONE, NONE),
    "test_marshalling_calls::test_a_call_leaves_no_references": (NONE, NONE),
    "test_marshalling_missing::test_without_headers_the_reason_is_written": (NONE, ALL),
    "test_marshalling_missing": (4, 3),
    "test_marshalling_missing::test_the_report_has_the_reason": (NONE, NONE),
    "test_determinism": (5, 3),
    "test_examples": (4, ALL),
    "test_markdown": (NONE, ALL),
    "test_examples::test_example": (NONE, 10),
    "test_examples::test_ranks_of_torchrun": (NONE, NONE),
    "test_instructions": (4, ALL),
    "test_instructions::test_no_more_instructions_than_recorded": (NONE, NONE),
    "test_instructions::test_counts_are_the_same_in_every_run": (NONE, NONE),
    "test_memory": (NONE, 25),
    "test_memory::test_memory_of_a_ring_falls_with_the_number_of_ranks": (NONE, NONE),
    "test_toolchain::test_triton_launches_where_it_is_reported_available": (NONE, NONE),
    "test_triton_optional": (NONE, ALL),
    "test_triton_optional::test_flops_are_counted_in_either_order_of_imports": (NONE, NONE),
    "test_deadline::test_no_test_starts_after_the_deadline_and_the_count_is_printed": (NONE, NONE),
    "test_deadline::test_all_tests_run_before_the_deadline": (NONE, NONE),
    "test_wheel": (NONE, ALL),
    "test_hub": (4, ALL),
    "test_hub::test_copies_run_beside_each_other_and_beside_the_installed_package": (NONE, NONE),
    "test_docstrings::test_form": (ALL, ALL),
    "test_types": (ALL, ALL),
    "test_types::test_pyright_finds_the_expected_errors": (NONE, ALL),
    "test_types::test_how_much_of_the_package_has_a_known_type": (NONE, NONE),
    # torch.compile, and modules compared with torch's.
    "test_introspection": (4, 9),
    "test_onnx": (4, 8),
    "test_onnx::test_calls": (7, 29),
    # A process that loads all programs, and a minute of compilation.
    "test_saved_programs": (NONE, 7),
    "test_saved_programs::test_packages_of_aotinductor": (NONE, NONE),
    "test_compiled_autograd": (NONE, 11),
    "test_compiled_autograd::test_compiled_by_inductor": (NONE, NONE),
    "test_checkpointing": (7, 2),
    "test_torch_profiler": (7, 2),
    "test_torch_profiler_records": (7, 2),
    "test_torch_profiler::test_compiled": (NONE, 2),
    "test_multihead_calls::test_compiles_as_one_graph_with_gradients": (4, 2),
    "test_sdpa_layout::test_compiled": (6, 2),
    "test_sdpa_layout::test_layouts": (5, 3),
    "test_multihead": (5, 2),
    "test_unbacked_sizes": (NONE, ALL),
    "test_unbacked_sizes::test_every_dimension": (NONE, 7),
    "test_encoder_layer": (7, 2),
    "test_encoder_layer::test_changed_submodules_are_called": (ALL, ALL),
    "test_nn_transformer": (5, 2),
    "test_nn_conversion": (5, 2),
    "test_nn_decoding": (5, 2),
    "test_ops": (5, 2),
    "test_ops_compile": (5, 5),
    "test_ops_compile::test_inductor_keeps_the_operators_whole_where_the_environment_has_ci": (
        NONE,
        NONE,
    ),
    "test_ops_func": (5, 2),
    "test_ops_gradients": (5, 2),
    "test_foreign_warnings": (NONE, NONE),
    "test_saved_objects": (4, 3),
    "test_pages::test_a_page_on_a_phone": (NONE, NONE),
    "test_triton_paged": (4, 5),
    "test_place": (4, 5),
    "test_orders": (4, 5),
    "test_dropout": (4, 5),
    # Tests that only a GPU runs.
    **dict.fromkeys(("test_gpu", "test_gpu_calls", "test_gpu_pairs"), (NONE, ALL)),
    **dict.fromkeys(("test_gpu_scale", "test_gpu_streams", "test_gpu_torch"), (NONE, ALL)),
    "test_gpu_tangents": (NONE, ALL),
    "test_gpu_wide": (NONE, ALL),
    "test_gpu_selected": (NONE, ALL),
}

# Shares in `all` of tests that have a command of their own; `whole` has all their cases.
OF_ALL = {
    # All CUDA kernels by nvcc, twenty minutes of one core: `make test-cuda`.
    "test_cuda_library::test_it_has_code_for_sm_80_and_sm_90_and_ptx_for_newer_gpus": NONE,
    "test_cuda_library::test_it_needs_no_library_of_cuda": NONE,
    "test_cuda_library::test_it_exports_its_c_abi_and_no_more": NONE,
    "test_cuda_library::test_it_loads_without_a_gpu": NONE,
    "test_cuda_library::test_the_drivers_error_is_raised": NONE,
    "test_cuda_library::test_one_build_folder_follows_each_setting": NONE,
    "test_ptxas::test_the_kernels_spill_no_more_than_allowed": NONE,
    "test_ptx_cuda::test_features": 3,
    "test_ptx_cuda::test_features_of_decode": 5,
    "test_ptx_cuda::test_features_of_weights": 4,
    "test_ptx_cuda::test_a_given_lse_is_a_constant": 7,
    "test_ptx_cuda::test_schedules": 5,
    "test_ptx_cuda::test_schedules_of_decode": 5,
    "test_ptx_cuda::test_schedules_of_weights": 5,
    "test_ptx_cuda::test_head_dims": 7,
    "test_ptx_cuda::test_head_dims_of_decode": 7,
    "test_ptx_cuda::test_head_dims_of_weights": 7,
    # Many kernels, each of which takes up to a minute to compile.
    "test_ptx_sm90::test_features": NONE,
    "test_ptx_sm90::test_edges_of_tiles": NONE,
    "test_ptx_sm90::test_head_dims": NONE,
    "test_ptx_sm90::test_packed": NONE,
    "test_ptx_sm90::test_pages": NONE,
    "test_ptx_sm90::test_each_synchronisation_deleted_is_noticed": NONE,
    "test_ptx_sm90::test_declined_calls_say_why_and_run": NONE,
    "test_ptx_sm90_backward::test_features": NONE,
    "test_ptx_sm90_backward::test_edges_of_tiles": NONE,
    "test_ptx_sm90_backward::test_head_dims": NONE,
    "test_ptx_sm90_backward::test_packed": NONE,
    "test_ptx_sm90_backward::test_each_synchronisation_deleted_is_noticed": NONE,
    "test_ptx_sm90_backward::test_declined_calls_say_why_and_run": NONE,
    "test_ptx_sm90_decode::test_features": NONE,
    "test_ptx_sm90_decode::test_head_dims": NONE,
    "test_ptx_sm90_decode::test_keys_around_tiles": NONE,
    "test_ptx_sm90_decode::test_packed": NONE,
    "test_ptx_sm90_decode::test_pages": NONE,
    "test_ptx_sm90_decode::test_each_synchronisation_deleted_is_noticed": NONE,
    "test_ptx_sm90_decode::test_rows_and_heads_of_a_tile": NONE,
    "test_ptx_sm90_decode::test_declined_calls_say_why_and_run": NONE,
    "test_gpu_mutants::test_a_fault_of_a_kernel_is_detected": 5,
    "test_gpu_mutants::test_a_fault_of_the_assembly_is_detected": 5,
    "test_gpu_mutants::test_a_fault_of_the_launch_path_is_detected": 5,
    "test_gpu_mutants::test_a_fault_of_a_compiled_kernel_is_detected": 5,
    "test_gpu_mutants::test_a_fault_of_a_hopper_kernel_is_detected": 5,
    "test_gpu_mutants::test_the_source_without_faults_passes": 5,
    "test_derivatives::test_pairs_of_features": 7,  # the others: pytest --tier=whole
    "test_ptx_triton::test_features": 9,
    "test_ptx_triton::test_blocks_of_a_mask": 3,
    "test_ptx_triton_functions": 6,
    "test_ptx_triton::test_packed": 3,
    "test_ptx_triton::test_paged": 4,
    "test_ptx_triton::test_paged_decode": 4,
    "test_ptx_triton::test_features_of_decode": 13,
    "test_ptx_triton::test_features_of_weights": 25,
    "test_ptx_triton::test_tiles": 5,
    "test_ptx_triton::test_tiles_of_decode": 7,
    "test_ptx_triton::test_tiles_of_weights": 4,
    "test_ptx_triton::test_every_schedule_gives_the_same_bits": 3,
    "test_ptx_blackwell_faults::test_a_fault_is_detected": 5,
}

# The shares of Triton's kernels in its interpreter, which is a separate run.
INTERPRETED_SHARES = {
    "test_features": (97, 89),
    "test_features::test_features": (11, 9),
    "test_features::test_pairs_of_features": (NONE, 89),
    "test_features::test_dropout_rates": (NONE, NONE),
    "test_features::test_every_broadcast_of_a_mask": (NONE, NONE),
    "test_features::test_every_subset_of_gradients": (NONE, NONE),
    "test_features::test_strided_masks": (NONE, NONE),
    "test_weights": (97, 73),
    "test_argument_shapes": (NONE, 23),
    "test_argument_shapes::test_a_mask_of_columns_that_sequences_share": (NONE, 3),
    "test_triton": (29, 29),
    "test_triton_functions": (29, 23),
    "test_triton_functions::test_beside_other_arguments": (NONE, 31),
    "test_triton_captured": (NONE, 13),
    "test_decode": (29, 23),
    "test_special_values": (29, 17),
    "test_dense_masks": (NONE, 29),
    "test_dense_masks::test_mask_planes": (NONE, NONE),
    "test_block_mask": (NONE, 61),
    "test_property": (NONE, 2),
    "test_property::test_any_call_is_right": (NONE, NONE),  # a minute
    "test_property::test_any_call_in_any_parts_is_right": (NONE, NONE),
    "test_property::test_window_of_w_is_not_of_w_plus_1": (NONE, NONE),
    "test_selected": (NONE, 97),
    "test_selected::test_the_order_of_indices_changes_no_bit": (NONE, NONE),
    "test_selected::test_other_items_change_no_bit": (NONE, NONE),
    "test_selected::test_rows_a_few_at_a_time": (NONE, NONE),
    "test_storage": (NONE, 31),
    "test_storage::test_quantised_cache_with_huge_and_tiny_scales": (NONE, NONE),
    "test_storage::test_quantised_cache_with_row_invariant": (NONE, NONE),
    "test_storage::test_quantised_cache_of_every_dtype_and_width": (NONE, NONE),
    "test_storage::test_threads_change_no_bits": (NONE, NONE),
    "test_storage::test_every_pattern_of_float8": (NONE, NONE),
    "test_triton_mutants": (NONE, 97),
    "test_triton_tangents": (NONE, 37),
    "test_tangents": (NONE, 47),
    "test_tangents::test_features": (NONE, 47),
    "test_tangents::test_pairs_of_features": (NONE, NONE),
    "test_tangents::test_packed": (NONE, NONE),
    "test_tangents::test_an_absent_tangent_is_zero": (NONE, NONE),
    "test_tangents::test_forwards_results_change_nothing": (NONE, NONE),
    "test_tangents::test_head_dims": (NONE, NONE),
    "test_nn_decoding::test_cached_decoding_equals_the_full_pass": (NONE, NONE),
    "test_dropout::test_every_word_of_the_seed_matters": (NONE, NONE),
    "test_nn_transformer::test_transformer": (NONE, NONE),
    "test_orders::test_every_pass_writes_in_every_order": (NONE, NONE),
    "test_place::test_parts_of_16_bits": (NONE, NONE),
}
INTERPRETED_DEFAULT = (NONE, 37)
INTERPRETED_OF_ALL = {  # two passes with many products: each feature in one dtype, and some pairs
    "test_tangents::test_features": 1,
    "test_tangents::test_pairs_of_features": 13,
}


def shares(interpreted):
    """(the table of a run, the default for files that are not in it)"""
    return (INTERPRETED_SHARES, INTERPRETED_DEFAULT) if interpreted else (SHARES, DEFAULT)


def share(item, tier, interpreted):
    """The share of an item in `check`, `test` or `all`."""
    table, default = shares(interpreted)
    path = Path(item.path)
    if path.parent.name == "package" and not interpreted:
        default = OF_PACKAGE
    file = path.stem
    function = getattr(item, "originalname", None) or item.name
    if tier == "all":
        of_all = INTERPRETED_OF_ALL if interpreted else OF_ALL
        return of_all.get(f"{file}::{function}", ALL)
    entry = table.get(f"{file}::{function}") or table.get(file) or default
    return entry[("check", "test").index(tier)]


def family(item):
    """A name that an item shares with those that differ from it only by dtype."""
    dtype = getattr(item, "callspec", None) and item.callspec.params.get("dtype")
    parts = item.nodeid.partition("[")[2].rstrip("]").split("-")
    return "-".join("*" if part == str(dtype) else part for part in parts)


def is_emulated(item):
    """Does it run on the CUDA emulator, which takes a minute to build?"""
    values = getattr(item, "callspec", None) and item.callspec.params.values()
    return any(value in ("cuda", "emulated") for value in values or () if isinstance(value, str))


def is_wide(item):
    """Does it run the emulator's kernels of head dims past `emulated.NARROW`?"""
    if not Path(item.path).stem.startswith(("test_cuda_", "test_emulator_banks")):
        return False
    params = item.callspec.params if hasattr(item, "callspec") else {}
    width = str(params.get("padded", params.get("d", 0))).split()[0]
    return params.get("shape") == "wide" or int(width) > 64


def chosen(items, tier, interpreted):
    """The items that `check`, `test` or `all` runs, as a set of node ids."""
    tests = {}
    if tier == "check":
        items = [item for item in items if not is_emulated(item)]
    elif tier == "test":  # compiling those takes two minutes, so they are in `rest`
        items = [item for item in items if not is_wide(item)]
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for cases in tests.values():
        n = share(cases[0], tier, interpreted)
        if n == ALL:
            kept.update(item.nodeid for item in cases)
        elif n != NONE:
            families = {}
            for item in cases:
                families.setdefault(family(item), []).append(item.nodeid)
            for turn, members in enumerate(list(families.values())[::n]):
                kept.add(members[turn % len(members)])
    return kept


def select(items, tier, interpreted):
    """(those that run, those that do not)"""
    if tier == "whole":
        return items, []
    inside = chosen(items, "all" if tier == "rest" else tier, interpreted)
    if tier == "rest":
        inside -= chosen(items, "test", interpreted)
    split = [], []
    for item in items:
        split[item.nodeid not in inside].append(item)
    return split
