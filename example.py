"""Chat with a model folder, or with the tiny model that ships with nanovllm: `python example.py [MODEL]`."""

import argparse
from pathlib import Path

import nanovllm
from nanovllm import LLM, SamplingParams

TINY_MODEL = Path(nanovllm.__file__).parent / "assets" / "tiny-qwen3"
QUESTIONS = ["introduce yourself", "list all prime numbers within 100"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(TINY_MODEL), help="model folder (default: the tiny Qwen3)")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--question", action="append", help="ask this instead; may be repeated")
    parser.add_argument("--stream", action="store_true", help="one answer after the other, shown as it comes")
    args = parser.parse_args()

    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with LLM(args.model, device=args.device) as llm:
        print(f"Model {Path(args.model).name} on {llm.runner.device} in {llm.runner.dtype}")
        chats = [[{"role": "user", "content": question}] for question in args.question or QUESTIONS]
        if args.stream:
            for chat in chats:
                print(f"\nPrompt:     {chat[0]['content']}\nCompletion: ", end="")
                [prompt] = llm.chat_prompts([chat])
                for piece in llm.stream(prompt, params):
                    print(piece["text"], end="", flush=True)
                print()
            return
        for chat, output in zip(chats, llm.chat(chats, params)):
            print(f"\nPrompt:     {chat[0]['content']}\nCompletion: {output['text']}")


if __name__ == "__main__":
    main()
