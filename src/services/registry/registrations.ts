import { toBinary } from '@bufbuild/protobuf';
import {
  type RegisterInstanceRequest,
  RegisterInstanceRequestSchema,
  type RegisterInstanceResponse,
} from '../../../gen/baton/v1/pool_registry_pb.ts';
import { AgingMap } from '../../stores/aging-map.ts';
import { idempotencyKeyReused } from '../../stores/refusals.ts';
import { requireCallKey } from '../call-arguments.ts';
import { sha256 } from '../sha256.ts';

/** The contract's time for which the answer to a key is replayed, and how many are kept at most. */
const REPLAY_MS = 10 * 60_000;
const MAX_REPLAYS = 16_384;

interface Answer {
  readonly fingerprint: string;
  readonly response: RegisterInstanceResponse;
}

/** The answers to registrations by idempotency key, for a while. */
export class Registrations {
  readonly #answers = new AgingMap<string, Answer>({ lifetimeMs: REPLAY_MS, maxCount: MAX_REPLAYS });

  /**
   * The answer that this request got before, or the one that `register` gives.
   *
   * @throws BatonError IDEMPOTENCY_KEY_REUSED if another request had the key
   */
  replayOr(
    request: RegisterInstanceRequest,
    now: number,
    register: () => RegisterInstanceResponse,
  ): RegisterInstanceResponse {
    const key = requireCallKey(request.idempotencyKey);
    const fingerprint = Buffer.from(sha256([toBinary(RegisterInstanceRequestSchema, request)])).toString('latin1');
    const answer = this.#answers.get(key, now);
    if (answer !== undefined) {
      if (answer.fingerprint !== fingerprint) throw idempotencyKeyReused(key);
      return answer.response;
    }
    const response = register();
    this.#answers.set(key, { fingerprint, response }, now);
    return response;
  }
}
