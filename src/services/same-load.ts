import { equals } from '@bufbuild/protobuf';
import { type LoadSample, LoadSampleSchema } from '../../gen/baton/v1/instance_pb.ts';

/** Whether two readings say the same; an instance is told anew with its old reading whenever something else changes. */
export function isSameLoad(a: LoadSample | undefined, b: LoadSample | undefined): boolean {
  return a === b || (a !== undefined && b !== undefined && equals(LoadSampleSchema, a, b));
}
