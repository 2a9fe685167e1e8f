"""One spec or more for every sampler of the registry; the contract tests run over all of them."""

SPECS = {
    "uniform": ["uniform"],
    "logit_normal": ["logit_normal", "logit_normal:mean=-0.5,std=0.7"],
    "mode": ["mode", "mode:scale=-0.5"],
    "cosmap": ["cosmap"],
    "beta": ["beta:a=0.6,b=2"],
    "edm": ["edm"],
    "laplace": ["laplace:location=0,scale=3"],
    "speed": ["speed:k=5", "speed:tau=700,mirror=true"],
    "speed_published": ["speed_published"],
    "table": ["table:file={table}"],
    "mix": ["mix:of=(beta:a=0.3,b=5),floor=0.2"],
    "shift": ["shift:of=(logit_normal:mean=0.5),shift=2"],
    "product": ["product:of=uniform,weight=(minsnr:gamma=5)"],
    "curriculum": ["curriculum:start=uniform,end=(speed:k=5),steps=12"],
    "switch": ["switch:first=uniform,then=(loss_adaptive:warmup=0,every=4),at=6"],
    "piecewise": ["piecewise:stages=(0=uniform,2=(beta:a=2,b=2,correction=unbiased),6=(loss_adaptive:warmup=0,every=2))"],
    "window": [
        "window:low=0.2,high=0.7",
        "window:of=(adaptive:warmup=2,every=2,correction=unbiased),low=-3,high=4,over=log_snr",
    ],
    "pairs": [
        "pairs:of=(logit_normal:mean=-0.4)",
        "pairs:of=(loss_moment:bins=8,history=3),equal=0.5,how=below",
        "pairs:of=(logit_normal:mean=-0.6,std=1.6),r=(logit_normal:mean=-4,std=1.6),equal=0.25",
    ],
    "curriculum_sampling": ["curriculum_sampling:total=12,share=0.5"],
    "loss_moment": ["loss_moment:bins=8,history=3"],
    "loss_adaptive": ["loss_adaptive:warmup=0,every=4+minsnr"],
    "gradient_variance": ["gradient_variance:strata=4,every=2,rows=4"],
    "infonoise": [
        "infonoise:warmup=2,every=2,strata=12,floor=0.1",
        "infonoise:pivot=none,warmup=0,every=3,strata=8,floor=0.3",
    ],
    "adaptive": [
        "adaptive:estimator=loss,warmup=4,every=4",
        "adaptive:estimator=loss,warmup=0,every=1,floor=0.1+minsnr",
        "adaptive:warmup=0,every=2,grow=3,steady=5,error=0.01,target=(minsnr)",
        "adaptive:estimator=reinforce,every=2,strata=20,queue=4,floor=0.2",
        "adaptive:estimator=reinforce,every=3,strata=12,policy=global,selection=correlation,scale_free=true",
        "adaptive:estimator=lookahead,strata=3,horizon=2,budget=1,probe=32,warmup=2,target=(vlb:clip=5)+minsnr",
    ],
    "paper_cifar10": ["paper_cifar10:every=4"],
    "paper_celebahq": ["paper_celebahq:every=4"],
    "paper_imagenet": ["paper_imagenet:every=4+minsnr"],
    "released_cifar10": ["released_cifar10:every=4"],
}

ALL_SPECS = [spec for specs in SPECS.values() for spec in specs]
LEARNING = ("switch", "piecewise", "loss_moment", "loss_adaptive", "gradient_variance", "infonoise", "adaptive")
LEARNING += ("paper_cifar10", "released_cifar10")
LEARNERS = [spec for name in LEARNING for spec in SPECS[name]]
CORRECTIONS = ["none", "unbiased", "clipped(3)", "tempered(0.5)"]
