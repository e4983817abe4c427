// What `buf generate` made of proto/baton/v1, and the details of its errors, as one entry of the package.
// biome-ignore-all lint/performance/noReExportAll: the entry is exactly what is generated; test/unit/proto-entry.test.ts holds it.
// biome-ignore-all lint/performance/noBarrelFile: nothing in this repository imports it.
export * from '../gen/baton/v1/error_reason_pb.ts';
export * from '../gen/baton/v1/instance_pb.ts';
export * from '../gen/baton/v1/kv_cache_store_pb.ts';
export * from '../gen/baton/v1/kv_transfer_pb.ts';
export * from '../gen/baton/v1/pool_registry_pb.ts';
export * from '../gen/baton/v1/router_pb.ts';
export * from '../gen/baton/v1/tokens_pb.ts';
export * from '../gen/baton/v1/watch_pb.ts';
export { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from '../gen/google/rpc/error_details_pb.ts';
