#!/usr/bin/env python3
"""Make a tiny random-weight model that takes pictures: the handed tiny Llama behind a small vision tower (LLaVA).

A picture is 16 tokens, whatever it shows.

usage: vision_model.py MAKE_MODEL_PY OUT_DIR
"""
import os
import subprocess
import sys

TEXT_PART = "{{ p.text }}"
ANY_PART = "{%- if p.type == 'text' -%}{{ p.text }}{%- else -%}<image>{%- endif -%}"
SIDE, PATCH = 56, 14


def main() -> None:
    make_model, out = sys.argv[1:3]
    subprocess.check_call([sys.executable, make_model, out])

    import torch
    from safetensors.torch import save_file
    from transformers import (AutoTokenizer, CLIPImageProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig,
                              LlavaForConditionalGeneration, LlavaProcessor)

    tok = AutoTokenizer.from_pretrained(out)
    tok.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tok.chat_template = tok.chat_template.replace(TEXT_PART, ANY_PART)
    image = tok.convert_tokens_to_ids("<image>")
    text = LlamaConfig.from_pretrained(out)
    text.vocab_size = len(tok) + 7
    vision = CLIPVisionConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                              image_size=SIDE, patch_size=PATCH, projection_dim=64)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=image, vision_feature_layer=-1,
                         vision_feature_select_strategy="default", image_seq_length=(SIDE // PATCH) ** 2)
    torch.manual_seed(7)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        # As large as make_model.py's: what is generated depends on the whole prompt, pictures too.
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
        # Nothing but printable ASCII is ever generated.
        for token in range(text.vocab_size):
            shown = tok.decode([token], skip_special_tokens=False) if token < len(tok) else ""
            if token in tok.all_special_ids or len(shown) != 1 or not (shown.isascii() and shown.isprintable()):
                model.lm_head.weight[token] = 0.0
    model.save_pretrained(out)
    save_file({vllm_name(name): weight.contiguous() for name, weight in model.state_dict().items()},
              os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
    size = {"height": SIDE, "width": SIDE}
    pixels = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size)
    LlavaProcessor(image_processor=pixels, tokenizer=tok, patch_size=PATCH, vision_feature_select_strategy="default",
                   chat_template=tok.chat_template, image_token="<image>", num_additional_image_tokens=1).save_pretrained(out)
    tok.save_pretrained(out)


def vllm_name(name: str) -> str:
    """The name under which vLLM 0.33 finds a weight."""
    for ours, theirs in (("model.vision_tower.vision_model.", "vision_tower.vision_model."),
                         ("model.vision_tower.", "vision_tower.vision_model."),
                         ("model.multi_modal_projector.", "multi_modal_projector."),
                         ("model.language_model.", "language_model.model."),
                         ("lm_head.", "language_model.lm_head.")):
        if name.startswith(ours):
            return theirs + name[len(ours):]
    return name


main()
