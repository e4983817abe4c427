import { type Duration, durationFromMs, durationMs } from '@bufbuild/protobuf/wkt';

/** A duration in milliseconds; unset is 0. */
export function toMs(duration: Duration | undefined): number {
  return duration === undefined ? 0 : durationMs(duration);
}

/** Milliseconds as a duration, to the full millisecond. */
export function toDuration(ms: number): Duration {
  return durationFromMs(Math.round(ms));
}
