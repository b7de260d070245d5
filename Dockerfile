# The course in a container, from the same lock as `make book`; JupyterLab on port 8888.
#   docker build -t dualpipe-lab-course .     --build-arg TORCH_INDEX_URL=<an index>: torch from there (README.md, "Installing torch")
#   docker run --rm -p 127.0.0.1:8888:8888 --shm-size 1g -v my-course:/home/learner/my-course dualpipe-lab-course
# The volume my-course keeps the learner's copies; JupyterLab starts on them as with `make lab`.
FROM python:3.11-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 learner \
    && install --directory --owner=learner /home/learner/my-course
WORKDIR /home/learner/course
COPY --chown=learner pyproject.toml requirements.txt requirements.lock README.md LICENSE LICENSE-text ./
COPY --chown=learner tools tools
COPY --chown=learner dualpipe_lab dualpipe_lab
COPY --chown=learner dualpipe_course dualpipe_course
COPY --chown=learner dualpipe_ours dualpipe_ours
USER learner
ARG TORCH_INDEX_URL=
RUN TORCH_INDEX_URL="$TORCH_INDEX_URL" tools/install.sh /home/learner/venv requirements.lock python3.11 \
    && rm -rf /home/learner/.cache
ENV PATH=/home/learner/venv/bin:$PATH
COPY --chown=learner book book
COPY --chown=learner exercises exercises
COPY --chown=learner _toc.yml jupytext.toml ./
EXPOSE 8888
CMD ["dualpipe-lab", "lab", "--to=/home/learner/my-course", "--ip=0.0.0.0", "--port=8888", "--no-browser"]
